"""What the operator refuses before it needs a GPU."""

import subprocess
import sys

import pytest
import torch

from gcmoe.config import MoEConfig
from gcmoe.errors import UnsupportedDevice
from gcmoe.models import MODELS, get_model, share
from gcmoe.operator import MoE, finalize_grid

CONFIG = MoEConfig(4096, 2048, 32, 6, 8, clamp=10.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch.cuda.is_available() is True")
def test_without_a_gpu_the_error_says_what_was_required_and_found():
    with pytest.raises(UnsupportedDevice) as caught:
        MoE(CONFIG)
    text = str(caught.value)
    assert "compute capability 9.0" in text
    assert "CUDA 13.0" in text
    assert "torch.cuda.is_available() is False" in text
    assert torch.__version__ in text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ring_slots": 3}, ValueError, "ring_slots = 3: .*power of two"),
        ({"dispatch_sms": 200}, ValueError, "dispatch_sms = 200"),
        ({"serial": True, "ring_slots": 2}, ValueError, "serial = True needs a ring for all"),
        ({"initial": (1, 2)}, TypeError, "initial must be"),
        ({"initial": (1, 2, 3.0)}, TypeError, "initial must be"),
        ({"initial": 5}, TypeError, "initial must be"),
        ({"device": "cpu"}, ValueError, "must be a CUDA device"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        MoE(CONFIG, **options)


def test_the_configuration_is_one():
    with pytest.raises(TypeError, match="must be a MoEConfig, got dict"):
        MoE({"hidden": 4096})


def test_finalize_grid_is_capped_by_work_and_sms():
    assert finalize_grid(MoEConfig(256, 128, 8, 2, 1), 116) == 1
    assert finalize_grid(MoEConfig(4096, 128, 8, 2, 8), 116) == 8
    assert finalize_grid(MoEConfig(4096, 128, 8, 2, 512), 116) == 116


def test_importing_the_operator_leaves_the_kernel_language_alone():
    code = "import gcmoe.operator, sys; print('cutlass' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("name", MODELS)
def test_models_are_layers(name):
    model = get_model(name)
    for tokens in (1, 64, 256):
        assert model.config(tokens).local_experts(8) == model.num_experts // 8
    part = share(name, 8)
    assert part.num_experts == model.num_experts // 8
    assert part.config(64).hidden == model.hidden


def test_models_are_named_and_shares_are_whole():
    with pytest.raises(ValueError, match=r"must be one of .*deepseek-v4-flash"):
        get_model("gpt-2")
    with pytest.raises(ValueError, match="ranks = 7: must divide the 256 experts"):
        share("deepseek-v4-flash", 7)
    with pytest.raises(ValueError, match="fewer than k = 6"):
        share("deepseek-v4-flash", 128)
