"""Bulk and tensor copies and the tensor core for :mod:`ptx_machine`, on the model of mx_datapath.

Each copy ends at a random later time. Copies of scales and MMAs of a CTA end in issue order, one by
one; a commit ends behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mx_datapath as mx
import numpy as np
import torch
from ptx_machine import ADVANCE, BLOCKED, LANES, Cta, Step, TensorMap, Warp
from ptx_text import Instruction

if TYPE_CHECKING:
    from ptx_operations import Decoder

Array = np.ndarray[Any, Any]


def inner(text: str) -> list[str]:
    """The operands of ``[map, {c0, c1}]``."""
    return [part.strip() for part in text.strip("[]").replace("{", "").replace("}", "").split(",")]


def single(action: Callable[[Warp, int], None], changes: bool = True) -> Step:
    """An instruction that every active lane carries out for itself."""

    def run(w: Warp, pc: int, mask: Array) -> int:
        for lane in np.flatnonzero(mask):
            action(w, int(lane))
        return ADVANCE

    return Step(run, changes=changes)


# --------------------------------------------------------------------------------------- copies


def complete(cta: Cta, mbarrier: int, num_bytes: int) -> None:
    barrier = cta.mbarrier(mbarrier)
    barrier.num_bytes -= num_bytes
    barrier.settle()


def bulk_load(ins: Instruction, d: Decoder) -> Step:
    target, source, size, mbarrier = (
        d.address(ins.operands[0]),
        d.address(ins.operands[1]),
        d.get(ins.operands[2]),
        d.address(ins.operands[3]),
    )

    def start(w: Warp, lane: int) -> None:
        cta = w.cta
        to, at, count, barrier = (int(g(w)[lane]) for g in (target, source, size, mbarrier))
        assert to % 16 == at % 16 == count % 16 == 0, f"bulk load of {count} bytes at {at:#x}"
        order = cta.machine.order
        order.copy(w, lane)
        order.copy_reads(w, *cta.machine.memory.find(at, count), count)
        order.copy_overwrites(w, to, count)

        def end() -> None:
            cta.shared[to : to + count] = cta.machine.memory.read(at, count)
            complete(cta, barrier, count)

        cta.machine.pending.append(end)

    return single(start)


def bulk_store(ins: Instruction, d: Decoder) -> Step:
    target, source, size = (
        d.address(ins.operands[0]),
        d.address(ins.operands[1]),
        d.get(ins.operands[2]),
    )

    def start(w: Warp, lane: int) -> None:
        cta, thread = w.cta, int(w.threads[lane])
        to, at, count = (int(g(w)[lane]) for g in (target, source, size))
        assert to % 16 == at % 16 == count % 16 == 0, f"bulk store of {count} bytes at {at:#x}"
        cta.machine.order.copy(w, lane)
        cta.machine.order.copy_reads(w, cta.shared, at, count)
        cta.uncommitted[thread] += 1

        def end() -> None:
            cta.machine.memory.write(to, cta.shared[at : at + count])
            cta.storing[thread] -= 1

        cta.machine.pending.append(end)
        cta.storing[thread] += 1

    return single(start)


def bulk_group(ins: Instruction, d: Decoder) -> Step:
    """``commit_group``, or a wait until all committed stores of the thread have ended."""
    if "commit_group" in ins.parts:

        def commit(w: Warp, lane: int) -> None:
            w.cta.uncommitted[int(w.threads[lane])] = 0

        return single(commit)
    assert ins.operands == ("0",)
    assert "read" not in ins.parts

    def wait(w: Warp, pc: int, mask: Array) -> int:
        for thread in w.threads[mask]:
            if w.cta.storing[int(thread)] > w.cta.uncommitted[int(thread)]:
                return BLOCKED
        return ADVANCE

    return Step(wait)


def tensor_load(ins: Instruction, d: Decoder) -> Step:
    """A box of a tensor map, swizzled by 128 bytes; the mbarrier counts bytes of memory."""
    from ptx_operations import PARAMETER_SPAN, PARAMETERS

    target, mbarrier = d.address(ins.operands[0]), d.address(ins.operands[2])
    where, *places = (d.get(text) for text in inner(ins.operands[1]))

    def start(w: Warp, lane: int) -> None:
        cta = w.cta
        number, rest = divmod(int(where(w)[lane]) - PARAMETERS, PARAMETER_SPAN)
        tensor_map = cta.launch.arguments[number]
        assert isinstance(tensor_map, TensorMap)
        assert rest == 0
        # Coordinates are signed 32-bit numbers.
        at = [int(np.int64(int(p(w)[lane]) << 32) >> 32) for p in places]
        to, barrier = int(target(w)[lane]), int(mbarrier(w)[lane])
        assert to % 1024 == 0
        assert at[0] == 0
        order = cta.machine.order
        order.copy(w, lane)
        order.copy_overwrites(w, to, 128 * tensor_map.box[1])

        def end() -> None:
            complete(cta, barrier, fill(cta, tensor_map, at, to))

        cta.machine.pending.append(end)

    return single(start)


def fill(cta: Cta, tensor_map: TensorMap, at: list[int], to: int) -> int:
    """Bring a box to shared memory; the bytes that it takes from memory."""
    memory, box = cta.machine.memory, tensor_map.box
    if tensor_map.nibbles:
        assert (box[0], tensor_map.strides) == (128, (64,))
        assert 0 <= at[1] <= tensor_map.dims[1] - box[1]
        count = 64 * box[1]
        content = torch.from_numpy(memory.read(tensor_map.address + 64 * at[1], count))
        cta.tensor_core().load_u4(content, 0, box[1], to)
        return count
    # The last dimension is the slowest.
    for number, index in enumerate(np.ndindex(*reversed(box[1:]))):
        place = [first + n for first, n in zip(at[1:], reversed(index), strict=True)]
        line = np.zeros(128, dtype=np.uint8)
        if all(0 <= p < size for p, size in zip(place, tensor_map.dims[1:], strict=True)):
            offset = sum(p * s for p, s in zip(place, tensor_map.strides, strict=True))
            line = memory.read(tensor_map.address + offset, 128)
        address = to + 128 * number + np.arange(128)
        cta.shared[address ^ ((address >> 7 & 7) << 4)] = line
    return int(np.prod(box))


# --------------------------------------------------------------------------------- tensor core


def allocate(ins: Instruction, d: Decoder) -> Step:
    get, count = d.address(ins.operands[0]), int(ins.operands[1])
    assert count in (32, 64, 128, 256, 512)

    def run(w: Warp, pc: int, mask: Array) -> int:
        cta = w.cta
        assert cta.columns is None
        first = cta.machine.random.randrange(0, 512 - count + 1, 32)
        cta.columns = first, count
        at = int(get(w)[0])
        cta.shared[at : at + 4] = np.array([first], dtype="<u4").view(np.uint8)
        return ADVANCE

    return Step(run, needs_warp=True, changes=True)


def release(ins: Instruction, d: Decoder) -> Step:
    get, count = d.get(ins.operands[0]), int(ins.operands[1])

    def run(w: Warp, pc: int, mask: Array) -> int:
        assert w.cta.columns == (int(get(w)[0]), count)
        assert not w.cta.tensor_work
        w.cta.columns = None
        return ADVANCE

    return Step(run, needs_warp=True, changes=True)


def columns_of(cta: Cta, address: int, count: int) -> int:
    """First column of an address, which must lie within what is allocated."""
    assert cta.columns is not None, "tensor memory is not allocated"
    column = address & 0xFFFF
    first, allocated = cta.columns
    assert first <= column <= first + allocated - count, f"column {column} + {count}"
    return column


def in_order(step: Step, loads: bool = False) -> Step:
    """The step, which waits on barriers must not come before without their fence."""

    def run(w: Warp, pc: int, mask: Array) -> int:
        w.cta.machine.order.tensor(w, mask, loads)
        return step.run(w, pc, mask)

    return Step(run, step.needs_warp, step.changes)


def fence(ins: Instruction, d: Decoder) -> Step:
    def run(w: Warp, pc: int, mask: Array) -> int:
        w.cta.machine.order.fence(w, mask, ins.operation)
        return ADVANCE

    return Step(run)


def scale_copy(ins: Instruction, d: Decoder) -> Step:
    target, descriptor = d.address(ins.operands[0]), d.get(ins.operands[1])
    assert ins.operation == "tcgen05.cp.cta_group::1.32x128b.warpx4"

    def start(w: Warp, lane: int) -> None:
        cta = w.cta
        column, source = columns_of(cta, int(target(w)[lane]), 4), int(descriptor(w)[lane])

        def end() -> None:
            core = cta.tensor_core()
            core.copy_scales(source, column)
            core.accumulator[:, column : column + 4] = torch.nan

        cta.tensor_work.append(end)

    return single(start)


def mma(ins: Instruction, d: Decoder) -> Step:
    """A block-scaled MMA; the scales that lay in the columns of D are gone afterwards."""
    assert ins.parts[-3:] == ["kind::mxf8f6f4", "block_scale", "block32"]
    places = [d.address(text) for text in (ins.operands[0], *ins.operands[4:6])]
    words = [d.get(text) for text in (*ins.operands[1:4], ins.operands[6])]

    def start(w: Warp, lane: int) -> None:
        cta = w.cta
        to, sfa, sfb = (int(g(w)[lane]) for g in places)
        a, b, instruction, accumulate = (int(g(w)[lane]) for g in words)
        n = 8 * mx.fields_of(instruction, mx.INSTRUCTION_FIELDS)["n"]
        d_column = columns_of(cta, to, n)
        scales = columns_of(cta, sfa, 4), columns_of(cta, sfb, 4)

        def end() -> None:
            core = cta.tensor_core()
            core.mma(a, b, instruction, bool(accumulate), d_column, *scales)
            core.tmem[:, d_column : d_column + n] = mx.random_bytes(core.generator, 128, n, 4)

        cta.tensor_work.append(end)

    return single(start)


def commit(ins: Instruction, d: Decoder) -> Step:
    get = d.address(ins.operands[0])

    def start(w: Warp, lane: int) -> None:
        cta, at = w.cta, int(get(w)[lane])

        def end() -> None:
            barrier = cta.mbarrier(at)
            barrier.pending -= 1
            barrier.settle()

        cta.tensor_work.append(end)

    return single(start)


def accumulators(ins: Instruction, d: Decoder) -> Step:
    """Eight columns of the warp's own 32 lanes, as they are now."""
    assert ins.operation == "tcgen05.ld.sync.aligned.32x32b.x8.b32"
    puts = [d.put(name.strip()) for name in ins.operands[0].strip("{}").split(",")]
    get = d.address(ins.operands[1])

    def run(w: Warp, pc: int, mask: Array) -> int:
        address = int(get(w)[0])
        lane, column = address >> 16, columns_of(w.cta, address, len(puts))
        assert lane == LANES * (w.index % 4), "a warp reads its own lanes"
        values = w.cta.tensor_core().accumulator[lane : lane + LANES, column : column + len(puts)]
        bits = values.to(torch.float32).numpy().view(np.uint32).astype(np.uint64)
        for put, row in zip(puts, bits.T, strict=True):
            put(w, mask, row)
        return ADVANCE

    return Step(run, needs_warp=True)


def decode(ins: Instruction, d: Decoder) -> Step:
    """The step of a copy or of a ``tcgen05`` instruction.

    Raises:
        NotImplementedError: an instruction that the machine does not know.
    """
    name = ins.operation
    for start, maker in (
        ("cp.async.bulk.tensor.", tensor_load),
        ("cp.async.bulk.shared::cluster.global", bulk_load),
        ("cp.async.bulk.global.shared::cta", bulk_store),
        ("cp.async.bulk.commit_group", bulk_group),
        ("cp.async.bulk.wait_group", bulk_group),
        ("tcgen05.alloc", allocate),
        ("tcgen05.dealloc", lambda ins, d: in_order(release(ins, d))),
        ("tcgen05.cp", lambda ins, d: in_order(scale_copy(ins, d))),
        ("tcgen05.mma", lambda ins, d: in_order(mma(ins, d))),
        ("tcgen05.commit", commit),
        ("tcgen05.ld", lambda ins, d: in_order(accumulators(ins, d), loads=True)),
        ("tcgen05.fence", fence),
    ):
        if name.startswith(start):
            return maker(ins, d)
    if name.startswith(("tcgen05.wait", "tcgen05.relinquish")):
        return Step(lambda w, pc, mask: ADVANCE)
    raise NotImplementedError(f"{name} {', '.join(ins.operands)}")
