"""What the bench does for a Blackwell GPU: its weights, its oracle, its kernels."""

import pytest
import torch
from on_cpu import TINY

from bench import checks, data
from bench.cases import VARIANTS, Case
from bench.checks import make_references
from bench.data import case_inputs, device_family, share_weights
from bench.impls.gcmoe_layer import plan_of
from gcmoe.numerics import PackedWeights, PackedWeightsSm100, moe_reference, unpack

CASE = Case(TINY.name, 5)


@pytest.fixture
def blackwell(on_cpu, monkeypatch):
    monkeypatch.setattr(data, "device_arch", lambda: "sm_103a")


def test_without_a_gpu_all_is_hoppers(on_cpu):
    assert device_family() == "sm90"
    assert isinstance(share_weights(CASE, 0, 0, 0), PackedWeights)
    assert not plan_of(CASE, VARIANTS["default"]).workspace.has_atoms


def test_weights_and_plan_are_of_the_family(blackwell):
    packed = share_weights(CASE, 0, 0, 0)
    assert isinstance(packed, PackedWeightsSm100)
    assert packed.num_experts == CASE.local_experts
    experts = unpack(packed)
    assert experts.w13_scale.unique().tolist() == experts.w2_scale.unique().tolist()
    assert experts.w13_scale.unique().tolist() == [117, 118, 119, 120]
    assert experts.w13.float().std() > 70  # all codes
    assert plan_of(CASE, VARIANTS["default"]).workspace.has_atoms


@pytest.mark.parametrize(("arch", "recipe"), [("sm_90a", "sm90"), ("sm_103a", "sm100")])
def test_results_are_held_to_the_recipe_of_the_family(on_cpu, monkeypatch, arch, recipe):
    """On Gaussian tokens the recipes give the same bits, so the argument itself is looked at."""
    monkeypatch.setattr(data, "device_arch", lambda: arch)
    seen = []

    def reference(*arguments):
        seen.append(arguments[-1])
        return moe_reference(*arguments)

    monkeypatch.setattr(checks, "moe_reference", reference)
    inputs = case_inputs(CASE, 1, 0, 0)
    (found,) = make_references(CASE, inputs, lambda layer, owner: share_weights(CASE, 0, 0, owner))
    one, experts = inputs[0], unpack(share_weights(CASE, 0, 0, 0))
    whole = moe_reference(one.source, one.ids, one.weights, experts, CASE.config(), recipe)
    assert torch.equal(found.y, whole.y[found.tokens])
    assert seen == [recipe]
