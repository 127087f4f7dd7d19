"""The workspace on the CPU and the fault record."""

import struct
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cuda.bindings import driver as real

from gcmoe.config import MoEConfig
from gcmoe.errors import GCMoEError
from gcmoe.plan import make_plan
from gcmoe.runtime import group
from gcmoe.runtime.group import RankGroup
from gcmoe.runtime.memory import HostRecord, RendezvousCount, Workspace, rendezvous_text

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


def test_a_host_record_without_a_device_address_is_freed(standin):
    standin.failing["cuMemHostGetDevicePointer"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(GCMoEError, match="cuMemHostGetDevicePointer failed"):
        HostRecord()
    assert standin.names().count("cuMemFreeHost") == 1


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


def test_the_own_failure_is_raised_also_when_the_ranks_cannot_be_told():
    class Broken(Peers):
        def gather(self, value):
            raise RuntimeError("connection lost")

    def fail():
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        Broken(0, [None]).together("step", fail)
    with pytest.raises(RuntimeError, match="connection lost"):
        Broken(0, [None]).together("step", lambda: 3)


def test_a_difference_names_both_values():
    with pytest.raises(ValueError, match=r"top_k differs .* rank 0 has 8, rank 1 has 6"):
        Peers(1, [{"top_k": "8"}]).require_equal({"top_k": "6"})
    Peers(1, [{"top_k": "6"}]).require_equal({"top_k": "6"})


def test_a_difference_between_two_others_is_seen_by_all():
    answers = [{"S": "8"}, {"S": "8"}, {"S": "4"}]
    for rank in range(3):
        others = answers[:rank] + answers[rank + 1 :]
        with pytest.raises(ValueError, match=r"S differs .* rank 0 has 8, rank 2 has 4"):
            Peers(rank, others).require_equal(answers[rank])


def test_unequal_rendezvous_counts_are_named():
    count = RendezvousCount(3)
    count.require_equal(Peers(0, [3, 3]))
    with pytest.raises(GCMoEError, match=r"rank 0 has made 3 rendezvous .* rank 2 4\. torch num"):
        count.require_equal(Peers(0, [3, 4]))


def test_a_rendezvous_that_waits_in_vain_says_why():
    class DistStoreError(RuntimeError):
        pass

    peers = Peers(1, ["other"])
    text = rendezvous_text(DistStoreError("wait timeout after 2000ms, keys: /a\nmore"), peers)
    assert "rank 1 waited in vain" in text
    assert "wait timeout after 2000ms, keys: /a." in text
    assert "same order" in text
    text = rendezvous_text(RuntimeError("out of memory"), peers)
    assert text == "symmetric memory: the rendezvous of 2 ranks failed: out of memory"


def test_one_rank_meets_nobody():
    ranks = RankGroup(None)
    ranks.open_barriers()
    ranks.barrier("alone", 0.0)
    assert ranks.gather(7) == [7]


class Store:
    """A key-value store that all ranks of a test share."""

    def __init__(self):
        self.values = {}
        self.timeout = timedelta(seconds=300)
        self.limits = []

    def set(self, key, value):
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key].encode()

    def delete_key(self, key):
        return self.values.pop(key, None) is not None

    def set_timeout(self, limit):
        self.timeout = limit
        self.limits.append(limit.total_seconds())


def ranks_on(store, rank, size):
    ranks = Peers(rank, [None] * (size - 1))
    ranks._store, ranks._name, ranks._turn = store, "name", 0
    return ranks


def test_a_barrier_names_who_is_missing_and_may_be_repeated():
    store = Store()
    first, second = ranks_on(store, 0, 3), ranks_on(store, 1, 3)
    with pytest.raises(GCMoEError, match=r"reset: rank 0 waited 0 s for rank 1, 2 of 3 in vain"):
        first.barrier("reset", 0.0)
    with pytest.raises(GCMoEError, match=r"rank 1 waited 0 s for rank 2 of 3"):
        second.barrier("reset", 0.0)
    third = ranks_on(store, 2, 3)
    for turn in range(4):
        if turn:
            for ranks in (first, second):
                with pytest.raises(GCMoEError, match="for rank"):
                    ranks.barrier("again", 0.0)
        step = "again" if turn else "reset"
        third.barrier(step, 0.0)
        first.barrier(step, 0.0)
        second.barrier(step, 0.0)
        # Keys of barriers that everybody has passed do not pile up.
        assert len(store.values) <= 6


def test_barriers_of_different_steps_do_not_pair():
    store = Store()
    first, second = ranks_on(store, 0, 2), ranks_on(store, 1, 2)
    with pytest.raises(GCMoEError, match="in vain"):
        first.barrier("cells zeroed", 0.0)
    with pytest.raises(GCMoEError, match=r"rank 1 is at 'calls ended', rank 0 at 'cells zeroed'"):
        second.barrier("calls ended", 0.0)
    with pytest.raises(GCMoEError, match=r"rank 0 is at 'cells zeroed', rank 1 at 'calls ended'"):
        first.barrier("cells zeroed", 0.0)
    assert (first._turn, second._turn) == (0, 0)
    second.barrier("cells zeroed", 0.0)
    first.barrier("cells zeroed", 0.0)


def test_steps_are_compared_without_a_store_too():
    ranks = ranks_on(None, 0, 2)
    ranks.others = ["reset"]
    ranks.barrier("reset")
    with pytest.raises(GCMoEError, match=r"rank 0 is at 'probe', rank 1 at 'reset'"):
        ranks.barrier("probe")


def test_two_ranks_meet_in_a_store_of_torch():
    store, done = dist.HashStore(), []

    def meet(rank):
        ranks = ranks_on(store, rank, 2)
        for turn in range(5):
            ranks.barrier(f"step {turn}", 20.0)
        done.append(rank)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(done) == [0, 1]


def test_a_store_that_has_gone_is_said():
    class Gone(Store):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(GCMoEError, match=r"does not answer: Connection reset.*only close"):
        ranks_on(Gone(), 0, 2).barrier("reset", 1.0)


def test_the_limit_of_the_store_is_put_back(monkeypatch):
    store = Store()
    monkeypatch.setattr(group, "default_store", lambda: store)
    with pytest.raises(KeyError), group.store_limit(4.0):
        raise KeyError
    assert store.limits == [4.0, 300.0]
    monkeypatch.setattr(group, "default_store", lambda: None)
    with group.store_limit(4.0):
        pass
