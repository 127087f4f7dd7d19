"""Which kernels a device gets, and what is said of those that no GPU has run."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gcmoe.errors import UnsupportedDevice
from gcmoe.plan.targets import FAMILIES
from gcmoe.runtime import device, doctor

ROOT = Path(__file__).parents[2]
GPUS = {"sm_90a": "NVIDIA H", "sm_100a": "NVIDIA B200", "sm_103a": "NVIDIA B300"}
"""How the names of the GPUs of a target begin."""


def with_capability(monkeypatch, *capability):
    facts = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        name="NVIDIA Test",
        multi_processor_count=148,
        total_memory=2**37,
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: facts.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")]
)
def test_the_target_follows_the_device(monkeypatch, capability, arch):
    with_capability(monkeypatch, *capability)
    assert device.arch_of(torch.device("cuda", 0)) == arch
    assert arch in FAMILIES


@pytest.mark.parametrize("capability", [(8, 9), (10, 1), (12, 0)])
def test_other_devices_are_refused_by_name(monkeypatch, capability):
    with_capability(monkeypatch, *capability)
    wanted = f"9.0, 10.0 or 10.3 .* found NVIDIA Test of compute capability {capability[0]}"
    with pytest.raises(UnsupportedDevice, match=wanted):
        device.arch_of(torch.device("cuda", 0))


@pytest.mark.parametrize("arch", sorted(set(device.TARGETS.values())))
def test_a_target_counts_as_run_only_by_a_committed_record(arch):
    """Such a record is of a GPU of the target, and its layers were right."""
    if arch not in device.RECORDS:
        with pytest.warns(RuntimeWarning, match=f"kernels for {arch} are compiled, not yet run"):
            device.warn_if_not_yet_run(arch)
        return
    record = json.loads((ROOT / device.RECORDS[arch]).read_text())
    assert record["gpu"].startswith(GPUS[arch])
    assert record["rows"]
    assert all(row["correct"] for row in record["rows"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.warn_if_not_yet_run(arch)


@pytest.mark.parametrize(
    ("capability", "level", "text"),
    [
        ((9, 0), doctor.OK, "128 GiB"),
        ((10, 3), doctor.NOTE, "kernels for sm_103a are compiled, not yet run"),
        ((12, 0), doctor.BAD, "9.0, 10.0 or 10.3 is required"),
    ],
)
def test_the_doctor_says_so(monkeypatch, capability, level, text):
    with_capability(monkeypatch, *capability)
    (finding,) = doctor.gpu(SimpleNamespace(device=0))
    assert finding.level == level
    assert finding.text.endswith(text) or text in finding.text
