"""What the instructions of :mod:`ptx_machine` do; those of the tensor core are in another file.

Registers hold 64-bit patterns, a lane each. An instruction becomes a closure over its decoded
operands, made once per kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import ptx_blackwell
import torch
from ptx_machine import (
    ADVANCE,
    BLOCKED,
    BRANCH,
    FAILED_POLL,
    LANES,
    SHARED_BASE,
    MBarrier,
    Step,
    Warp,
)
from ptx_text import Instruction, Program

from gcmoe.numerics import encode_e4m3

Array = np.ndarray[Any, Any]
Getter = Callable[[Warp], Array]
PARAMETER_SPAN = 1 << 16
PARAMETERS = 0x7F00_0000_0000
"""Where parameters seem to lie: one every ``PARAMETER_SPAN`` bytes."""


@cache
def bits_of(kind: str) -> int:
    return 1 if kind == "pred" else int(re.sub(r"\D", "", kind)[:2])


def masked(value: Array, bits: int) -> Array:
    return value & np.uint64((1 << bits) - 1)


def signed(value: Array, bits: int) -> Array:
    """The patterns as signed 64-bit numbers."""
    if bits == 64:
        return value.view(np.int64)
    low = masked(value, bits).astype(np.int64)
    return np.where(low >= 1 << (bits - 1), low - (1 << bits), low)


def number(value: Array, kind: str) -> Array:
    """Register patterns as numbers of a PTX type."""
    bits = bits_of(kind)
    if kind.startswith("f"):
        return value.astype(np.uint32).view(np.float32)
    return signed(value, bits) if kind.startswith("s") else masked(value, bits)


def pattern(value: Array, kind: str) -> Array:
    """Numbers of a PTX type as register patterns."""
    if kind.startswith("f"):
        return value.astype(np.float32).view(np.uint32).astype(np.uint64)
    return masked(value.astype(np.uint64), bits_of(kind))


class Decoder:
    """Operands of one kernel: names to places in the register file."""

    def __init__(self, program: Program) -> None:
        self.program, self.names = program, {"_": 0}

    def register(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def get(self, text: str) -> Getter:
        """How to read an operand of 32 lanes."""
        special: dict[str, Getter] = {
            "%tid.x": lambda w: w.threads,
            "%ctaid.x": lambda w: np.full(LANES, w.cta.index, dtype=np.uint64),
            "%nctaid.x": lambda w: np.full(LANES, w.cta.launch.grid, dtype=np.uint64),
            "%laneid": lambda w: np.arange(LANES, dtype=np.uint64),
            "%smid": lambda w: np.full(LANES, w.cta.index, dtype=np.uint64),
            "%globaltimer": lambda w: np.full(LANES, w.cta.machine.turns, dtype=np.uint64),
        }
        if text in special:
            return special[text]
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+|0f[0-9A-Fa-f]{8}", text):
            base = 16 if text.startswith(("0x", "0f")) else 10
            value = int(text[2:] if base == 16 else text, base)
            constant = np.full(LANES, value & ((1 << 64) - 1), dtype=np.uint64)
            return lambda w: constant
        if text.startswith("__dynamic_shmem__"):
            shared = np.full(LANES, SHARED_BASE, dtype=np.uint64)
            return lambda w: shared
        if text.startswith(self.program.name + "_param_"):
            place = PARAMETERS + PARAMETER_SPAN * int(text.rpartition("_")[2])
            address = np.full(LANES, place, dtype=np.uint64)
            return lambda w: address
        index = self.register(text)
        return lambda w: w.registers[index]

    def address(self, text: str) -> Getter:
        """How to compute ``[base+offset]``."""
        base, _, offset = text.strip("[]").partition("+")
        get, more = self.get(base.strip()), np.uint64(int(offset or "0"))
        return lambda w: get(w) + more

    def put(self, text: str) -> Callable[[Warp, Array, Array], None]:
        """How to write lanes of a register."""
        index = self.register(text)

        def put(w: Warp, mask: Array, value: Array) -> None:
            np.copyto(w.registers[index], value, where=mask)

        return put if text != "_" else lambda w, mask, value: None


def items(text: str) -> list[str]:
    """The registers of ``{a, b}``, or the one register."""
    return [part.strip() for part in text.strip("{}").split(",")]


# --------------------------------------------------------------------------------- arithmetic


def bf16(x: Array) -> Array:
    return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)


def e4m3(x: Array) -> Array:
    return encode_e4m3(torch.from_numpy(x.copy())).numpy()


def shifted(value: Array, by: Array, bits: int, op: Callable[[Array, Array], Array]) -> Array:
    """A shift; by ``bits`` or more it pushes everything out."""
    amount = np.minimum(by, np.uint64(bits - 1))
    result = op(value, amount.astype(value.dtype))
    if value.dtype == np.int64:
        return result
    return np.where(by >= bits, np.uint64(0), result)


def ordered(a: Array, b: Array, pick: Any) -> Array:
    return np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), pick(a, b))


def halves(op: Any, a: Array, b: Array) -> Array:
    """``op`` on both 16-bit halves of a word."""
    low, high = np.uint64(0xFFFF), np.uint64(16)
    return op(a & low, b & low) | (op(a >> high & low, b >> high & low) << high)


BINARY: dict[str, Callable[..., Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": np.minimum,
    "max": np.maximum,
    "div": lambda a, b: a // np.maximum(b, np.uint64(1)),
}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": lambda a: -a,
    "abs": np.abs,
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
    "rcp": lambda a: (1.0 / a.astype(np.float64)).astype(np.float32),
}


def arithmetic(ins: Instruction, d: Decoder) -> Callable[[Warp], Array] | None:
    """The value of an instruction without side effects; None if it is no such."""
    name, parts, kind = ins.parts[0], ins.parts, ins.parts[-1]
    if name in ("mov", "cvta") or (name == "cvt" and len(parts) == 3 and kind[0] != "f"):
        get = d.get(ins.operands[1])
        if name == "cvt" and kind[0] == "s":
            return lambda w: signed(get(w), bits_of(kind)).view(np.uint64)
        bits = min(bits_of(k) for k in parts[1:] if k[0] in "usbp") if name != "cvta" else 64
        return lambda w: masked(get(w), bits)
    if name == "cvt":
        high, low = d.get(ins.operands[1]), d.get(ins.operands[2])
        convert, shift = (e4m3, 8) if "e4m3x2" in parts else (bf16, 16)

        def pair(w: Warp) -> Array:
            one, two = (convert(number(g(w), "f32")).astype(np.uint64) for g in (high, low))
            return one << np.uint64(shift) | two

        return pair
    gets = [d.get(text) for text in ins.operands[1:]]
    if name == "setp":
        compare = COMPARE[parts[1]]
        return lambda w: compare(number(gets[0](w), kind), number(gets[1](w), kind)).astype(
            np.uint64
        )
    if name == "selp":
        return lambda w: np.where(gets[2](w) != 0, gets[0](w), gets[1](w))
    if name == "lop3":
        assert ins.operands[4] == "0xEA"
        return lambda w: (gets[0](w) & gets[1](w)) | gets[2](w)
    if name == "popc":
        return lambda w: np.array([int(v).bit_count() for v in masked(gets[0](w), 32)], np.uint64)
    if name == "not":
        return lambda w: masked(~gets[0](w), bits_of(kind))
    if name in UNARY:
        unary = UNARY[name]
        return lambda w: pattern(unary(number(gets[0](w), kind)), kind)
    if name in ("shl", "shr"):
        op = np.left_shift if name == "shl" else np.right_shift
        bits = bits_of(kind)
        return lambda w: masked(
            shifted(number(gets[0](w), kind), masked(gets[1](w), 32), bits, op).astype(np.uint64),
            bits,
        )
    if parts[:3] == ["shf", "l", "wrap"]:
        # The upper half of two words, the second on top, shifted to the left.
        return lambda w: masked(
            (masked(gets[1](w), 32) << np.uint64(32) | masked(gets[0](w), 32))
            << (gets[2](w) & np.uint64(31))
            >> np.uint64(32),
            32,
        )
    if name in ("mul", "mad") and kind[0] != "f":
        return product(parts, kind, gets)
    if name == "mul":
        return lambda w: pattern(number(gets[0](w), kind) * number(gets[1](w), kind), kind)
    if name == "fma":
        return lambda w: pattern(
            (
                number(gets[0](w), kind).astype(np.float64) * number(gets[1](w), kind)
                + number(gets[2](w), kind)
            ),
            kind,
        )
    if name in BINARY:
        binary = BINARY[name]
        if kind == "u16x2":
            return lambda w: halves(binary, gets[0](w), gets[1](w))
        if "NaN" in parts:
            pick = binary
            return lambda w: pattern(
                ordered(number(gets[0](w), kind), number(gets[1](w), kind), pick), kind
            )
        return lambda w: pattern(binary(number(gets[0](w), kind), number(gets[1](w), kind)), kind)
    return None


def product(parts: list[str], kind: str, gets: list[Getter]) -> Callable[[Warp], Array]:
    """``mul`` and ``mad`` of integers: lo, hi and wide."""
    bits = bits_of(kind)
    wide = 2 * bits if "wide" in parts else bits

    def run(w: Warp) -> Array:
        a, b = (number(get(w), kind).astype(np.uint64) for get in gets[:2])
        result = a * b
        if "hi" in parts:
            result = result >> np.uint64(bits)
        if len(gets) == 3:
            result = result + gets[2](w)
        return masked(result, wide)

    return run


# ------------------------------------------------------------------------------------- memory


def load(ins: Instruction, d: Decoder) -> Step:
    """``ld`` of parameters, shared and global memory; an acquire ends the turn."""
    kind, space = ins.parts[-1], " ".join(ins.parts)
    puts, get = [d.put(name) for name in items(ins.operands[0])], d.address(ins.operands[1])
    size = bits_of(kind) // 8

    def run(w: Warp, pc: int, mask: Array) -> int:
        addresses = get(w)
        values = np.zeros((len(puts), LANES), dtype=np.uint64)
        for lane in np.flatnonzero(mask):
            at = int(addresses[lane])
            if "param" in space:
                n, offset = divmod(at - PARAMETERS, PARAMETER_SPAN)
                argument: Any = w.cta.launch.arguments[n]
                value = argument[offset // 8] if isinstance(argument, list) else argument
                values[0, lane] = value & ((1 << (8 * size)) - 1)
                continue
            if "shared" in space:
                raw = w.cta.shared[at : at + size * len(puts)]
                w.cta.machine.order.loaded_shared(w, int(lane), at, size)
            else:
                assert at % (size * len(puts)) == 0, f"misaligned {ins.operation} at {at:#x}"
                raw = w.cta.machine.memory.read(at, size * len(puts))
            values[:, lane] = raw.view(f"<u{size}")
            if "acquire" in space:
                w.cta.machine.order.acquire(w, int(lane))
        for put, row in zip(puts, values, strict=True):
            put(w, mask, row)
        return FAILED_POLL if "acquire" in space else ADVANCE

    return Step(run)


def write(w: Warp, lane: int, space: str, at: int, size: int, words: list[int]) -> None:
    content = np.array([v & ((1 << (8 * size)) - 1) for v in words], dtype=f"<u{size}")
    raw = content.view(np.uint8)
    assert at % len(raw) == 0, f"misaligned store at {at:#x}"
    machine, shared = w.cta.machine, "shared" in space
    array, offset = (w.cta.shared, at) if shared else machine.memory.find(at, len(raw))
    array[offset : offset + len(raw)] = raw
    machine.order.wrote(w, lane, array, offset, len(raw), shared)


def store(ins: Instruction, d: Decoder) -> Step:
    kind, space = ins.parts[-1], " ".join(ins.parts)
    get, values = d.address(ins.operands[0]), [d.get(name) for name in items(ins.operands[1])]
    size = bits_of(kind) // 8

    def run(w: Warp, pc: int, mask: Array) -> int:
        addresses, rows = get(w), [value(w) for value in values]
        for lane in np.flatnonzero(mask):
            words = [int(row[lane]) for row in rows]
            write(w, int(lane), space, int(addresses[lane]), size, words)
        return ADVANCE

    return Step(run, changes=True)


ATOMICS: dict[str, Callable[..., int]] = {
    "add": lambda old, v: old + v,
    "xor": lambda old, v: old ^ v,
    "max": lambda old, v: max(old, v),
    "cas": lambda old, v, new: new if old == v else old,
    "inc": lambda old, v: 0 if old >= v else old + 1,
}


def atomic(ins: Instruction, d: Decoder) -> Step:
    """``atom`` and ``red``, lane after lane."""
    kind, space = ins.parts[-1], " ".join(ins.parts)
    operation = next(ATOMICS[part] for part in ins.parts if part in ATOMICS)
    has_result = ins.parts[0] == "atom"
    put = d.put(ins.operands[0]) if has_result else None
    rest = ins.operands[1:] if has_result else ins.operands
    get, values = d.address(rest[0]), [d.get(text) for text in rest[1:]]
    size = bits_of(kind) // 8

    def run(w: Warp, pc: int, mask: Array) -> int:
        addresses, rows = get(w), [value(w) for value in values]
        old = np.zeros(LANES, dtype=np.uint64)
        for lane in np.flatnonzero(mask):
            at = int(addresses[lane])
            if "shared" in space:
                raw = w.cta.shared[at : at + size]
            else:
                raw = w.cta.machine.memory.read(at, size)
            old[lane] = int(raw.view(f"<u{size}")[0])
            arguments = [int(row[lane]) & ((1 << (8 * size)) - 1) for row in rows]
            write(w, int(lane), space, at, size, [operation(int(old[lane]), *arguments)])
        if put:
            put(w, mask, old)
        return ADVANCE

    return Step(run, changes=True)


# --------------------------------------------------------------------------- warp and control


def shuffle(ins: Instruction, d: Decoder) -> Step:
    mode = ins.parts[2]
    put, get, by = d.put(ins.operands[0]), d.get(ins.operands[1]), d.get(ins.operands[2])
    lanes = np.arange(LANES)

    def run(w: Warp, pc: int, mask: Array) -> int:
        offset = by(w).astype(np.int64)
        source = {"idx": offset, "bfly": lanes ^ offset, "up": lanes - offset}[mode]
        put(w, mask, get(w)[np.where(source < 0, lanes, source)])
        return ADVANCE

    return Step(run, needs_warp=True)


def across(ins: Instruction, d: Decoder) -> Step:
    """Ballot, match and the largest of all lanes."""
    put, get, name = d.put(ins.operands[0]), d.get(ins.operands[1]), ins.parts[0]

    def run(w: Warp, pc: int, mask: Array) -> int:
        values = [int(v) & 0xFFFF_FFFF for v in get(w)]
        if name == "vote":
            found = [sum(1 << i for i in range(LANES) if values[i])] * LANES
        elif name == "match":
            found = [sum(1 << i for i in range(LANES) if values[i] == v) for v in values]
        else:
            found = [max(values)] * LANES
        put(w, mask, np.array(found, dtype=np.uint64))
        return ADVANCE

    return Step(run, needs_warp=True)


def elect(ins: Instruction, d: Decoder) -> Step:
    put = d.put(ins.operands[0].partition("|")[2])

    def run(w: Warp, pc: int, mask: Array) -> int:
        put(w, mask, (np.arange(LANES) == np.flatnonzero(mask)[0]).astype(np.uint64))
        return ADVANCE

    return Step(run, needs_warp=True)


def branch(ins: Instruction, d: Decoder) -> Step:
    target = d.program.labels[ins.operands[0]]
    guard, negated = d.get(ins.guard) if ins.guard else None, ins.negated

    def run(w: Warp, pc: int, mask: Array) -> int:
        taken = mask if guard is None else mask & ((guard(w) == 0) == negated)
        rest = mask & ~taken
        if rest.any():
            w.move(pc, rest, pc + 1)
        if taken.any():
            w.move(pc, taken, target)
        return BRANCH

    return Step(run)


def control(ins: Instruction, d: Decoder) -> Step | None:
    """Branches, ends, fences and barriers."""
    name = ins.operation
    if name.startswith("bra"):
        return branch(ins, d)
    if name == "ret":

        def leave(w: Warp, pc: int, mask: Array) -> int:
            w.leave(pc, mask)
            return BRANCH

        return Step(leave, changes=True)
    if name == "trap":

        def trap(w: Warp, pc: int, mask: Array) -> int:
            raise AssertionError(f"trap: {w.where()}")

        return Step(trap)
    if name == "bar.sync":

        def barrier(w: Warp, pc: int, mask: Array) -> int:
            w.cta.machine.order.arrive(w)
            w.cta.arrive_at_barrier(w)
            return BRANCH

        assert ins.operands == ("0",)
        return Step(barrier, needs_warp=True, changes=True)
    if name == "bar.warp.sync":
        return Step(lambda w, pc, mask: ADVANCE, needs_warp=True)
    if name.startswith("fence."):

        def fence(w: Warp, pc: int, mask: Array) -> int:
            w.cta.machine.order.fence(w, mask, name)
            return ADVANCE

        return Step(fence)
    if name == "griddepcontrol.wait":

        def prerequisites(w: Warp, pc: int, mask: Array) -> int:
            waits = any(not launch.has_ended for launch in w.cta.launch.prerequisites)
            return BLOCKED if waits else ADVANCE

        return Step(prerequisites)
    if name.startswith(("nanosleep", "griddepcontrol.launch_dependents")):
        return Step(lambda w, pc, mask: ADVANCE)
    return None


# ----------------------------------------------------------------------------------- mbarriers


def mbarrier(ins: Instruction, d: Decoder) -> Step:
    """Initialisation, arrivals and waits; by every active lane."""
    name = ins.parts[1]
    place = next(i for i, text in enumerate(ins.operands) if text.startswith("["))
    get, rest = d.address(ins.operands[place]), [d.get(t) for t in ins.operands[place + 1 :]]
    put = d.put(ins.operands[0]) if name == "try_wait" else None
    expects = "expect_tx" in ins.parts

    def run(w: Warp, pc: int, mask: Array) -> int:
        addresses, values = get(w), [r(w) for r in rest]
        results = np.zeros(LANES, dtype=np.uint64)
        for lane in np.flatnonzero(mask):
            at = int(addresses[lane])
            if name == "init":
                w.cta.mbarriers[at] = MBarrier(int(values[0][lane]), int(values[0][lane]))
                continue
            barrier = w.cta.mbarrier(at)
            if name == "arrive":
                w.cta.machine.order.arrive(w)
                barrier.num_bytes += int(values[0][lane]) if expects else 0
                barrier.pending -= 1
                barrier.settle()
            else:
                results[lane] = barrier.phase != int(values[0][lane]) & 1
        if put is None:
            return ADVANCE
        put(w, mask, results)
        w.cta.machine.order.wait(w, mask & (results != 0))
        return ADVANCE if results[mask].all() else FAILED_POLL

    return Step(run, changes=put is None)


# ------------------------------------------------------------------------------------- decode


def decode_one(ins: Instruction, d: Decoder) -> Step:
    """The step of an instruction.

    Raises:
        NotImplementedError: an instruction that the machine does not know.
    """
    name = ins.parts[0]
    step = control(ins, d)
    if step is not None:
        return step
    makers = {
        "ld": load,
        "st": store,
        "atom": atomic,
        "red": atomic,
        "shfl": shuffle,
        "vote": across,
        "match": across,
        "redux": across,
        "elect": elect,
        "mbarrier": mbarrier,
    }
    if name in makers:
        step = makers[name](ins, d)
    elif name in ("cp", "tcgen05"):
        step = ptx_blackwell.decode(ins, d)
    elif name == "mov" and ins.operands[0].startswith("{"):
        low, high = (d.put(text) for text in items(ins.operands[0]))
        get = d.get(ins.operands[1])

        def split(w: Warp, pc: int, mask: Array) -> int:
            low(w, mask, masked(get(w), 32))
            high(w, mask, get(w) >> np.uint64(32))
            return ADVANCE

        step = Step(split)
    else:
        value = arithmetic(ins, d)
        if value is None:
            raise NotImplementedError(f"{ins.operation} {', '.join(ins.operands)}")
        put = d.put(ins.operands[0])

        def compute(w: Warp, pc: int, mask: Array) -> int:
            put(w, mask, value(w))
            return ADVANCE

        step = Step(compute)
    return guarded(step, d.get(ins.guard), ins.negated) if ins.guard else step


def guarded(step: Step, guard: Getter, negated: bool) -> Step:
    """The step for those lanes only whose predicate holds."""

    def run(w: Warp, pc: int, mask: Array) -> int:
        chosen = mask & ((guard(w) == 0) == negated)
        return step.run(w, pc, chosen) if chosen.any() else ADVANCE

    assert not step.needs_warp
    return Step(run, changes=step.changes)


@lru_cache(maxsize=16)
def decode(program: Program) -> tuple[list[Step], int]:
    """Steps of a kernel and the number of its registers."""
    decoder = Decoder(program)
    steps = [decode_one(ins, decoder) for ins in program.instructions]
    return steps, len(decoder.names) + 1
