"""The inline PTX of all architectures; what only Blackwell has is in ``ptx_sm100``. Nothing else
emits assembly.

Functions without side effects may be moved and merged by the compiler; the others stay where they
are and order the memory accesses around them. Addresses are 64-bit integers in global memory and
32-bit integers in shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

U16, U32, U64 = cutlass.Uint16, cutlass.Uint32, cutlass.Uint64
I32, I64, F32 = cutlass.Int32, cutlass.Int64, cutlass.Float32

_CODES: dict[Any, str] = {U32: "r", I32: "r", U64: "l", I64: "l", F32: "f", U16: "h"}
_TYPES: dict[Any, Any] = {
    U32: T.i32,
    I32: T.i32,
    U64: T.i64,
    I64: T.i64,
    F32: T.f32,
    U16: T.i16,
}


def _emit(
    text: str, results: list[Any], arguments: list[tuple[Any, Any]], pure: bool, loc: Any, ip: Any
) -> Any:
    """Emit ``text``; ``$0..`` are the results, then the arguments as (type, value) pairs."""
    operands = [kind(value).ir_value(loc=loc, ip=ip) for kind, value in arguments]
    codes = ["=" + _CODES[kind] for kind in results] + [_CODES[kind] for kind, _ in arguments]
    if not pure:
        codes.append("~{memory}")
    types = [_TYPES[kind]() for kind in results]
    if len(types) > 1:
        out_type = ir.Type.parse(f"!llvm.struct<({', '.join(str(kind) for kind in types)})>")
    else:
        out_type = types[0] if types else None
    out = llvm.inline_asm(
        out_type,
        operands,
        text,
        ",".join(codes),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not results:
        return None
    if len(results) == 1:
        return results[0](out)
    return tuple(
        kind(llvm.extractvalue(_TYPES[kind](), out, [i], loc=loc, ip=ip))
        for i, kind in enumerate(results)
    )


emit = _emit
"""For the file that holds the PTX of one architecture."""


# --------------------------------------------------------------------------- arithmetic


@dsl_user_op
def prmt(a: Any, b: Any, selector: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Four bytes of the pair (a, b), picked by the nibbles of ``selector``."""
    args = [(U32, a), (U32, b), (U32, selector)]
    return _emit("prmt.b32 $0, $1, $2, $3;", [U32], args, True, loc, ip)


@dsl_user_op
def and_or(a: Any, mask: Any, c: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """``(a & mask) | c`` in one instruction."""
    args = [(U32, a), (U32, mask), (U32, c)]
    return _emit("lop3.b32 $0, $1, $2, $3, 0xEA;", [U32], args, True, loc, ip)


@dsl_user_op
def umax(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    return _emit("max.u32 $0, $1, $2;", [U32], [(U32, a), (U32, b)], True, loc, ip)


@dsl_user_op
def min_nan(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The smaller of two; NaN if one is NaN."""
    return _emit("min.NaN.f32 $0, $1, $2;", [F32], [(F32, a), (F32, b)], True, loc, ip)


@dsl_user_op
def max_nan(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The larger of two; NaN if one is NaN."""
    return _emit("max.NaN.f32 $0, $1, $2;", [F32], [(F32, a), (F32, b)], True, loc, ip)


@dsl_user_op
def exp2_approx(a: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """2^a to 2 ulp; subnormals flushed."""
    return _emit("ex2.approx.ftz.f32 $0, $1;", [F32], [(F32, a)], True, loc, ip)


@dsl_user_op
def rcp_approx(a: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """1/a to 1 ulp; subnormals flushed."""
    return _emit("rcp.approx.ftz.f32 $0, $1;", [F32], [(F32, a)], True, loc, ip)


@dsl_user_op
def bits_of(a: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The 32 bits of a float."""
    return _emit("mov.b32 $0, $1;", [U32], [(F32, a)], True, loc, ip)


@dsl_user_op
def float_of(a: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The float with these 32 bits."""
    return _emit("mov.b32 $0, $1;", [F32], [(U32, a)], True, loc, ip)


@dsl_user_op
def e4m3x2(high: Any, low: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Two E4M3 codes, nearest even, saturating; ``low`` in bits 0-7."""
    text = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $1, $2; cvt.u32.u16 $0, h; }"
    return _emit(text, [U32], [(F32, high), (F32, low)], True, loc, ip)


@dsl_user_op
def bf16x2(high: Any, low: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Two BF16 values, nearest even; ``low`` in bits 0-15."""
    text = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return _emit(text, [U32], [(F32, high), (F32, low)], True, loc, ip)


@dsl_user_op
def popcount(a: Any, *, loc: Any = None, ip: Any = None) -> Any:
    return _emit("popc.b32 $0, $1;", [U32], [(U32, a)], True, loc, ip)


@dsl_user_op
def umax_u16x2(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The larger of two in each half of a word."""
    return _emit("max.u16x2 $0, $1, $2;", [U32], [(U32, a), (U32, b)], True, loc, ip)


# --------------------------------------------------------------------------- warp and machine


@dsl_user_op
def ballot(predicate: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Mask of the lanes with a non-zero value; all 32 lanes take part."""
    text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return _emit(text, [U32], [(U32, predicate)], False, loc, ip)


@dsl_user_op
def match_any(value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Mask of the lanes with the same value; all 32 lanes take part."""
    return _emit("match.any.sync.b32 $0, $1, 0xffffffff;", [U32], [(U32, value)], False, loc, ip)


@dsl_user_op
def sm_id(*, loc: Any = None, ip: Any = None) -> Any:
    return _emit("mov.u32 $0, %smid;", [U32], [], False, loc, ip)


@dsl_user_op
def global_timer(*, loc: Any = None, ip: Any = None) -> Any:
    """Nanoseconds, the same clock on all SMs of a GPU."""
    return _emit("mov.u64 $0, %globaltimer;", [I64], [], False, loc, ip)


@dsl_user_op
def parameter_u64(symbol: str, index: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Word ``index`` of an array that the kernel takes by value as parameter ``symbol``."""
    text = (
        "{ .reg .b64 base, offset; cvt.u64.u32 offset, $1; shl.b64 offset, offset, 3; "
        f"mov.b64 base, {symbol}; add.u64 base, base, offset; ld.param.u64 $0, [base]; }}"
    )
    return _emit(text, [I64], [(I32, index)], False, loc, ip)


# --------------------------------------------------------------------------- shared memory


@dsl_user_op
def shared_load(address: Any, *, loc: Any = None, ip: Any = None) -> Any:
    text = "ld.volatile.shared::cta.u32 $0, [$1];"
    return _emit(text, [U32], [(I32, address)], False, loc, ip)


@dsl_user_op
def shared_store(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    text = "st.volatile.shared::cta.u32 [$0], $1;"
    _emit(text, [], [(I32, address), (U32, value)], False, loc, ip)


@dsl_user_op
def shared_load_u8(address: Any, *, loc: Any = None, ip: Any = None) -> Any:
    text = "ld.volatile.shared::cta.u8 $0, [$1];"
    return _emit(text, [U32], [(I32, address)], False, loc, ip)


@dsl_user_op
def shared_load_u16(address: Any, *, loc: Any = None, ip: Any = None) -> Any:
    text = "{ .reg .b16 h; ld.volatile.shared::cta.u16 h, [$1]; cvt.u32.u16 $0, h; }"
    return _emit(text, [U32], [(I32, address)], False, loc, ip)


@dsl_user_op
def shared_store_u16(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; st.volatile.shared::cta.u16 [$0], h; }"
    _emit(text, [], [(I32, address), (U32, value)], False, loc, ip)


@dsl_user_op
def shared_max(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    text = "red.relaxed.cta.shared::cta.max.u32 [$0], $1;"
    _emit(text, [], [(I32, address), (U32, value)], False, loc, ip)


@dsl_user_op
def shared_add(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Add and return the old value."""
    text = "atom.relaxed.cta.shared::cta.add.u32 $0, [$1], $2;"
    return _emit(text, [U32], [(I32, address), (U32, value)], False, loc, ip)


MBARRIER_LIMIT_NS = 3_600_000_000_000


# Begins where p says whether the phase is over.
_MBARRIER_LOOP = (
    "@p bra DONE;\n"
    "mov.u64 t0, %globaltimer;\n"
    "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
    "@p bra DONE;\n"
    "mov.u64 t, %globaltimer;\n"
    "sub.u64 t, t, t0;\n"
    f"setp.lt.u64 q, t, {MBARRIER_LIMIT_NS};\n"
    "@q bra WAIT;\n"
    "trap;\n"
    "DONE: }"
)


@dsl_user_op
def mbarrier_wait(address: Any, parity: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Wait for a phase. After an hour it traps: one such wait can span several waits on memory,
    each within its budget, but an expiry here is a bug and must not hang the GPU for ever."""
    text = (
        "{ .reg .pred p, q; .reg .u64 t0, t;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
    ) + _MBARRIER_LOOP
    _emit(text, [], [(I32, address), (U32, parity)], False, loc, ip)


@dsl_user_op
def mbarrier_test(address: Any, parity: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """1 if a phase is over, else 0, without waiting."""
    text = (
        "{ .reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2;\n"
        "selp.u32 $0, 1, 0, p; }"
    )
    return _emit(text, [U32], [(I32, address), (U32, parity)], False, loc, ip)


@dsl_user_op
def mbarrier_wait_unless(
    is_over: Any, address: Any, parity: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """:func:`mbarrier_wait`, unless :func:`mbarrier_test` has said that the phase is over."""
    text = "{ .reg .pred p, q; .reg .u64 t0, t;\nsetp.ne.u32 p, $2, 0;\n" + _MBARRIER_LOOP
    _emit(text, [], [(I32, address), (U32, parity), (U32, is_over)], False, loc, ip)


@dsl_user_op
def mbarrier_arrive(address: Any, *, loc: Any = None, ip: Any = None) -> None:
    text = "mbarrier.arrive.shared::cta.b64 _, [$0];"
    _emit(text, [], [(I32, address)], False, loc, ip)


@dsl_user_op
def mbarrier_expect(address: Any, num_bytes: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive, and expect bulk loads of ``num_bytes`` in this phase."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    _emit(text, [], [(I32, address), (I32, num_bytes)], False, loc, ip)


# --------------------------------------------------------------------------- global memory


@dsl_user_op
def load_u32(address: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """A plain load; ordered by the acquire before it, never through the read-only cache."""
    return _emit("ld.global.b32 $0, [$1];", [U32], [(I64, address)], False, loc, ip)


@dsl_user_op
def load_u64(address: Any, *, loc: Any = None, ip: Any = None) -> Any:
    return _emit("ld.global.b64 $0, [$1];", [U64], [(I64, address)], False, loc, ip)


@dsl_user_op
def load_u32x4(address: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """16 bytes as four words; the address is a multiple of 16."""
    text = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return _emit(text, [U32] * 4, [(I64, address)], False, loc, ip)


@dsl_user_op
def store_u32(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    _emit("st.global.b32 [$0], $1;", [], [(I64, address), (U32, value)], False, loc, ip)


@dsl_user_op
def store_u64(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    _emit("st.global.b64 [$0], $1;", [], [(I64, address), (U64, value)], False, loc, ip)


@dsl_user_op
def store_u8(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    _emit("st.global.u8 [$0], $1;", [], [(I64, address), (U32, value)], False, loc, ip)


@dsl_user_op
def store_u32x4(
    address: Any, a: Any, b: Any, c: Any, d: Any, *, loc: Any = None, ip: Any = None
) -> None:
    text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    words = [(U32, a), (U32, b), (U32, c), (U32, d)]
    _emit(text, [], [(I64, address), *words], False, loc, ip)


@dsl_user_op
def store_host_u32(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """A word of host-mapped memory."""
    text = "st.relaxed.sys.global.b32 [$0], $1;"
    _emit(text, [], [(I64, address), (U32, value)], False, loc, ip)


@dsl_user_op
def store_host_release_u32(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """A word of host-mapped memory that the words stored before it by this thread precede."""
    text = "st.release.sys.global.b32 [$0], $1;"
    _emit(text, [], [(I64, address), (U32, value)], False, loc, ip)


_CELL_TYPES = {"u32": U32, "b32": U32, "b64": U64}


@dsl_user_op
def cell_load(op: Any, mark: str, address: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """A load of a cell, as a row of the edge table says."""
    text = f"{op.ptx} $0, [$1]; // gcmoe {mark}"
    return _emit(text, [_CELL_TYPES[op.dtype]], [(I64, address)], False, loc, ip)


@dsl_user_op
def cell_store(
    op: Any, mark: str, address: Any, value: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """A store or a reduction on a cell."""
    text = f"{op.ptx} [$0], $1; // gcmoe {mark}"
    kind = _CELL_TYPES[op.dtype]
    _emit(text, [], [(I64, address), (kind, value)], False, loc, ip)


@dsl_user_op
def cell_atomic(
    op: Any, mark: str, address: Any, *values: Any, loc: Any = None, ip: Any = None
) -> Any:
    """An atomic on a cell; returns the old value. ``cas`` takes (compare, new)."""
    kind = _CELL_TYPES[op.dtype]
    tail = ", ".join(f"${i + 2}" for i in range(len(values)))
    text = f"{op.ptx} $0, [$1], {tail}; // gcmoe {mark}"
    args = [(I64, address), *((kind, value) for value in values)]
    return _emit(text, [kind], args, False, loc, ip)


@dsl_user_op
def fence(kind: str, mark: str, *, loc: Any = None, ip: Any = None) -> None:
    """``fence.acq_rel.sys``, ``fence.proxy.async.global`` and the like; never the bare async form,
    which compiles to a fence of the whole GPU (measured 1.38 against 0.10 us on H200)."""
    if kind == "proxy.async":
        raise ValueError("name the state space of the proxy fence")
    _emit(f"fence.{kind}; // gcmoe {mark}", [], [], False, loc, ip)


# --------------------------------------------------------------------------- bulk copies


@dsl_user_op
def bulk_load(
    shared: Any,
    address: Any,
    num_bytes: Any,
    mbarrier: Any,
    *,
    evict_first: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Global to shared; completes ``num_bytes`` on the mbarrier."""
    hint, suffix = "", ""
    if evict_first:
        hint, suffix = ", 0x12F0000000000000", ".L2::cache_hint"
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        f"{suffix} [$0], [$1], $2, [$3]{hint};"
    )
    args = [(I32, shared), (I64, address), (I32, num_bytes), (I32, mbarrier)]
    _emit(text, [], args, False, loc, ip)


@dsl_user_op
def bulk_store(
    address: Any, shared: Any, num_bytes: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Shared to global, in the thread's current bulk group."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _emit(text, [], [(I64, address), (I32, shared), (I32, num_bytes)], False, loc, ip)


@dsl_user_op
def tensor_load_4d(
    shared: Any,
    tensor_map: Any,
    c0: Any,
    c1: Any,
    c2: Any,
    c3: Any,
    mbarrier: Any,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """One box of a tensor map to shared memory, zeros for what lies outside the tensor; completes
    the bytes of a whole box on the mbarrier."""
    text = (
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[$0], [$1, {$2, $3, $4, $5}], [$6];"
    )
    args = [
        (I32, shared),
        (I64, tensor_map),
        (I32, c0),
        (I32, c1),
        (I32, c2),
        (I32, c3),
        (I32, mbarrier),
    ]
    _emit(text, [], args, False, loc, ip)


@dsl_user_op
def release_dependents(*, loc: Any = None, ip: Any = None) -> None:
    """Kernels behind a programmatic edge may start once every CTA has come here or ended."""
    _emit("griddepcontrol.launch_dependents;", [], [], False, loc, ip)


@dsl_user_op
def await_prerequisites(*, loc: Any = None, ip: Any = None) -> None:
    """The kernels before a programmatic edge have ended and all they wrote is visible."""
    _emit("griddepcontrol.wait;", [], [], False, loc, ip)


@dsl_user_op
def bulk_commit(*, loc: Any = None, ip: Any = None) -> None:
    _emit("cp.async.bulk.commit_group;", [], [], False, loc, ip)


@dsl_user_op
def bulk_wait(mark: str, *, loc: Any = None, ip: Any = None) -> None:
    """All bulk stores of this thread are complete; needed before their flag."""
    _emit(f"cp.async.bulk.wait_group 0; // gcmoe {mark}", [], [], False, loc, ip)
