"""The workspace on the CPU and the fault record."""

import struct

import pytest
import torch

from gcmoe.config import MoEConfig
from gcmoe.errors import GCMoEError
from gcmoe.plan import make_plan
from gcmoe.runtime.group import RankGroup
from gcmoe.runtime.memory import HostRecord, Workspace

SHAPE = make_plan(MoEConfig(1024, 256, 8, 2, 4), ring_slots=4).workspace


def read(workspace: Workspace, region: str) -> tuple[int, ...]:
    place = SHAPE.region(region)
    form = {4: "I", 8: "Q"}[place.item_bytes]
    return struct.unpack(f"<{place.count}{form}", workspace.view(region).numpy().tobytes())


@pytest.mark.parametrize("initial", [(1, 0, 0), (0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFF0), (5, 6, 7)])
def test_reset_writes_every_cell(initial):
    workspace = Workspace(SHAPE, torch.device("cpu"), RankGroup(None))
    assert workspace.peers == [workspace.address]
    workspace.buffer.fill_(0xA5)
    workspace.reset_cells(*initial)
    values = SHAPE.initial_cells(*initial)
    for region in SHAPE.regions:
        if region.is_cell:
            wanted = tuple(values.get(region.name, [0] * region.count))
            assert read(workspace, region.name) == wanted, region.name
        else:
            assert bool((workspace.view(region.name) == 0xA5).all())


def test_views_share_memory_and_unknown_regions_raise():
    workspace = Workspace(SHAPE, torch.device("cpu"), RankGroup(None))
    workspace.view("abort").fill_(1)
    assert int(workspace.buffer[SHAPE.offsets["abort"]]) == 1
    with pytest.raises(KeyError):
        workspace.view("no such region")


def test_host_record(standin):
    record = HostRecord()
    assert standin.arguments("cuMemHostAlloc") == [(64, 3)]
    assert record.read() == (0,) * 16
    record.words[0], record.words[8] = 1, 0xFFFFFFFF
    assert record.read()[0] == 1
    assert record.read()[8] == 0xFFFFFFFF
    record.clear()
    assert record.read() == (0,) * 16
    record.close()
    record.close()
    assert standin.names().count("cuMemFreeHost") == 1
    assert record.words[0] == 0


class Peers(RankGroup):
    """This rank among others whose answers are given."""

    def __init__(self, rank, others):
        self.group, self.rank, self.others = object(), rank, others
        self.size = len(others) + 1

    def gather(self, value):
        return [*self.others[: self.rank], value, *self.others[self.rank :]]


def test_ranks_fail_together():
    with pytest.raises(GCMoEError, match="step failed on rank 1: OSError: disk"):
        Peers(0, ["OSError: disk"]).together("step", lambda: 3)

    def fail():
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        Peers(0, ["OSError: disk"]).together("step", fail)
    assert Peers(0, [None]).together("step", lambda: 3) == 3


def test_a_difference_names_both_values():
    with pytest.raises(ValueError, match=r"top_k differs .* rank 1 has 6, rank 0 has 8"):
        Peers(1, [{"top_k": "8"}]).require_equal({"top_k": "6"})
    Peers(1, [{"top_k": "6"}]).require_equal({"top_k": "6"})
