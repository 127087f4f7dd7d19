"""The operator on a Blackwell device, against the recording driver."""

import ctypes
import re
from dataclasses import replace

import pytest
import torch
from small_layer import CONFIG, inputs, weights

from gcmoe import operator as operators
from gcmoe.numerics import pack
from gcmoe.operator import MoE
from gcmoe.protocol import Role
from gcmoe.runtime import driver, probe


@pytest.fixture
def make(standin, fake_device, fake_kernel, monkeypatch):
    standin.num_sms = 148
    fake_device.arch = "sm_103a"
    monkeypatch.setattr(operators, "get_kernel", fake_kernel)
    # The probe waits for kernels; its graph is made and launched all the same.
    monkeypatch.setattr(probe, "require_hand_off", lambda run, *_: run(dict.fromkeys(Role, 1.0)))

    def make(**options):
        with pytest.warns(RuntimeWarning, match="kernels for sm_103a are compiled, not yet run"):
            return MoE(CONFIG, **options)

    return make


def blackwell_weights():
    e, h, i = CONFIG.num_experts, CONFIG.hidden, CONFIG.intermediate
    return pack(
        torch.randint(0, 256, (e, 2 * i, h // 2), dtype=torch.uint8),
        torch.full((e, 2 * i, h // 32), 120, dtype=torch.uint8),
        torch.randint(0, 256, (e, h, i // 2), dtype=torch.uint8),
        torch.full((e, h, i // 32), 120, dtype=torch.uint8),
        CONFIG,
        arch="sm100",
    )


def test_plan_and_kernels_are_of_the_family(make):
    op = make()
    assert op.family == "sm100"
    assert op.plan.workspace.has_atoms
    assert (op.plan.num_sms, op._grids[Role.COMPUTE]) == (148, 140)
    assert {spec.arch for spec in op._sizes[op.plan].specs.values()} == {"sm_103a"}


def test_the_probe_has_maps_over_the_room_that_is_guessed_into(make, standin):
    op = make()
    names = [arguments[5] for arguments in standin.maps if len(arguments) == 6]
    assert names == [driver.PADDED_NIBBLES] * 2
    room = probe.weight_bytes(op.plan.workspace, op._grids[Role.COMPUTE])
    # One W1 item per ticket: its codes, and its scales from the start of the same room.
    items = CONFIG.num_experts * CONFIG.intermediate // 128
    assert room >= items * CONFIG.hidden // 128 * (16384 + 1024)


def test_a_layer_gets_maps_of_its_codes_and_runs(make, standin):
    op, packed = make(), blackwell_weights()
    standin.maps.clear()
    layer = op.bind(packed)
    codes = [arguments[1] for arguments in standin.maps if len(arguments) == 6]
    assert codes == [packed.w13.data_ptr(), packed.w2.data_ptr()]
    assert len(standin.maps) == 2 + len(op.plan.tiles.widths)
    before = standin.names().count("cuGraphLaunch")
    assert layer(*inputs()).shape == inputs()[0].shape
    assert standin.names().count("cuGraphLaunch") == before + 1


def test_weights_of_the_other_family_are_refused(make):
    op = make()
    text = "packed must be PackedWeightsSm100, as gcmoe.pack(..., arch='sm100') returns"
    with pytest.raises(TypeError, match=re.escape(text)):
        op.bind(weights())
    packed = blackwell_weights()
    with pytest.raises(ValueError, match=re.escape("packed.arch is 'sm90', must be 'sm100'")):
        op.bind(replace(packed, arch="sm90"))
    storage = torch.zeros(packed.w2.nbytes + 64, dtype=torch.uint8)
    at = -storage.data_ptr() % 32 + 16
    shifted = storage[at : at + packed.w2.nbytes].view(packed.w2.shape)
    with pytest.raises(ValueError, match=r"packed\.w2 must be contiguous and aligned to 32 bytes"):
        op.bind(replace(packed, w2=shifted))
    with pytest.raises(ValueError, match=r"packed\.w13_scale has dtype torch\.int8"):
        op.bind(replace(packed, w13_scale=packed.w13_scale.view(torch.int8)))


def test_late_compute_has_the_maps_too(make, standin, monkeypatch):
    """Its argument block is a copy: the encoded bytes of every tensor map, at other addresses."""
    op, marks = make(late_compute=True, green_contexts=True), iter(range(1, 100))
    encode = lambda target, *rest: ctypes.memset(target, next(marks), 128)  # noqa: E731
    monkeypatch.setattr(driver, "encode_tiled", encode)
    layer = op.bind(blackwell_weights())
    nodes = [arguments[3] for arguments in standin.arguments("cuGraphAddKernelNode")][-4:]
    _, compute, late, _ = nodes
    spec = layer.op._sizes[layer.op.plan].specs[Role.COMPUTE]
    blocks = [
        (ctypes.c_void_p * len(spec.parameters)).from_address(int(node.kernelParams))
        for node in (compute, late)
    ]
    found = []
    for parameter, first, second in zip(spec.parameters, *blocks, strict=True):
        if parameter.kind == "tensor_map":
            assert first != second
            assert first % 64 == second % 64 == 0
            assert ctypes.string_at(first, 128) == ctypes.string_at(second, 128)
            found.append(ctypes.string_at(first, 1)[0])
    # Each was encoded on its own: two of weights, one per token box.
    assert sorted(found) == list(range(1, 7))
