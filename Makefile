# Every target prepares .venv first: minutes on a fresh machine, nothing the second time.
#
# Without a GPU: a private environment with the torch release below, installed before anything
# that depends on torch. With a GPU (nvidia-smi answers) whose python3 has torch >= 2.11: an
# environment on top of that torch, whose CUDA build fits the machine.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH := torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.gcmoe-ready
PYTEST_ARGS ?=

.PHONY: help setup demo test test-gpu lint format fit docs plots

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' Makefile | expand -t 16

setup: $(STAMP) ## prepare .venv

demo: $(STAMP) ## one layer against the oracle: on the GPU, else simulated
	@$(BIN)/python -m gcmoe demo

test: lint ## lint, types and every test that needs no GPU
	@$(BIN)/python -m pytest -q -m "not gpu" $(PYTEST_ARGS)

test-gpu: $(STAMP) ## the tests that need Hopper GPUs
	@$(BIN)/python -m pytest -q -m gpu $(PYTEST_ARGS)

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP) ## rewrite files as ruff wants them
	@$(BIN)/python -m ruff format .

plots: $(STAMP) ## pictures and docs/benchmarks.md, from the records in bench/results
	@$(BIN)/python -m bench.plots

fit: $(STAMP) ## derive the constants of gcmoe plan from the newest record of V4-Flash
	@$(BIN)/python -m gcmoe.plan.fit --write

docs: $(STAMP) ## regenerate docs/protocol.md, docs/kernels.md and the table of docs/blackwell.md
	@$(BIN)/python -m gcmoe.protocol.document docs/protocol.md
	$(BIN)/python -m gcmoe.kernels.document docs/kernels.md
	$(BIN)/python -m gcmoe.kernels.variants docs/blackwell.md

$(STAMP): pyproject.toml Makefile
	@on_system=0
	recent='import sys, torch; sys.exit([int(x) for x in torch.__version__.split(".")[:2]] < [2, 11])'
	if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
	    if $(PYTHON) -c "$$recent" 2>/dev/null; then on_system=1; fi
	fi
	if [ ! -x $(BIN)/python ]; then
	    options=""
	    if [ $$on_system = 1 ]; then options=--system-site-packages; fi
	    $(PYTHON) -m venv $$options $(VENV)
	fi
	pip="$(BIN)/python -m pip --disable-pip-version-check"
	if [ $$on_system = 0 ] || ! $(BIN)/python -c 'import torch' 2>/dev/null; then
	    $$pip install --quiet "$(TORCH)"
	fi
	$$pip install --quiet -e '.[dev]'
	touch $(STAMP)
