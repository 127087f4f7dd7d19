"""The machine for PTX itself: small programs whose results are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_machine import SHARED_BASE, Deadlock, Launch, Machine
from ptx_text import parse, pieces, split_operands

HEAD = """
.visible .entry small_0(
    .param .u64 small_0_param_0
)
{
    .reg .pred %p<9>;
    ld.param.b64 %rd1, [small_0_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 8;
    add.s64 %rd3, %rd1, %rd2;
"""


def run(body: str, threads: int = 32, seed: int = 0) -> np.ndarray:
    """One u64 per thread, which the body stores at [%rd3]; %r1 is the thread."""
    machine = Machine(seed)
    out = np.zeros(8 * threads, dtype=np.uint8)
    program = parse(f"{HEAD}{body}\n    ret;\n}}\n")
    launch = Launch(program, 1, threads, 4096, [machine.memory.map(out)])
    machine.run(launch)
    return out.view("<u8")


LANE = np.arange(32, dtype=np.uint64)
SIGNED = LANE.astype(np.int64) - 16
ARITHMETIC = {
    "shl.b32 %r9, %r1, 31;": LANE % 2 << np.uint64(31),
    "shl.b32 %r9, 1, %r1;": np.uint64(1) << LANE,
    "mov.b32 %r8, 32; shl.b32 %r9, %r1, %r8;": LANE * 0,
    "sub.s32 %r8, %r1, 16; shr.s32 %r9, %r8, 2;": (SIGNED >> 2) % 2**32,
    "sub.s32 %r8, %r1, 16; shr.u32 %r9, %r8, 28;": SIGNED % 2**32 >> 28,
    "sub.s32 %r8, %r1, 16; min.s32 %r9, %r8, -3;": np.minimum(SIGNED, -3) % 2**32,
    "sub.s32 %r8, %r1, 16; max.u32 %r9, %r8, 3;": np.maximum(SIGNED % 2**32, 3),
    "sub.s32 %r8, %r1, 16; mul.hi.u32 %r9, %r8, %r8;": np.array(
        [(int(v) % 2**32) ** 2 >> 32 for v in SIGNED]
    ),
    "mad.lo.s32 %r9, %r1, -7, 3;": (LANE.astype(np.int64) * -7 + 3) % 2**32,
    "setp.lt.u32 %p1, %r1, 5; selp.b32 %r9, 11, 22, %p1;": np.where(LANE < 5, 11, 22),
    "add.s32 %r8, %r1, 1; div.u32 %r9, 100, %r8;": 100 // (LANE + np.uint64(1)),
    "popc.b32 %r9, %r1;": np.array([int(v).bit_count() for v in LANE]),
    "lop3.b32 %r9, %r1, 6, 8, 0xEA;": LANE & np.uint64(6) | np.uint64(8),
    "shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;": LANE ^ np.uint64(5),
    "shfl.sync.up.b32 %r9, %r1, 2, 0, -1;": np.where(LANE < 2, LANE, LANE - np.uint64(2)),
    "redux.sync.max.u32 %r9, %r1, 0xffffffff;": LANE * 0 + np.uint64(31),
    "shr.u32 %r8, %r1, 3; match.any.sync.b32 %r9, %r8, 0xffffffff;": np.array(
        [0xFF << (8 * (i // 8)) for i in range(32)]
    ),
    "{ .reg .pred p; setp.ne.u32 p, %r1, 0; vote.sync.ballot.b32 %r9, p, 0xffffffff; }": (
        LANE * 0 + np.uint64(0xFFFF_FFFE)
    ),
}


@pytest.mark.parametrize("text", ARITHMETIC)
def test_arithmetic(text: str) -> None:
    found = run(f"{text} cvt.u64.u32 %rd9, %r9; st.global.b64 [%rd3], %rd9;")
    assert found.tolist() == np.asarray(ARITHMETIC[text]).astype(np.uint64).tolist()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mul.f32 %r9, %r8, 0f40400000;", lambda x: x * 3),
        ("ex2.approx.ftz.f32 %r9, %r8;", torch.exp2),
        ("add.f32 %r7, %r8, 0f3F800000; rcp.approx.ftz.f32 %r9, %r7;", lambda x: 1 / (x + 1)),
        ("min.NaN.f32 %r9, %r8, 0f3F000000;", lambda x: torch.clamp(x, max=0.5)),
    ],
)
def test_floats(text: str, wanted) -> None:
    """Of the numbers with the bits 0x3F000000 + 2^20 * lane."""
    words = 0x3F00_0000 + (np.arange(32, dtype=np.int32) << 20)
    body = f"shl.b32 %r2, %r1, 20; add.s32 %r8, %r2, {0x3F00_0000}; {text}"
    found = run(f"{body} cvt.u64.u32 %rd9, %r9; st.global.b64 [%rd3], %rd9;")
    result = torch.from_numpy(found.astype(np.uint32).view(np.float32).copy())
    expected = wanted(torch.from_numpy(words.view(np.float32).copy()))
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)


def test_lanes_part_and_meet() -> None:
    """Each lane loops as often as its number says; then all exchange."""
    found = run(
        """
        mov.b32 %r2, 0;
        mov.b32 %r3, 0;
        AGAIN:
        setp.ge.u32 %p1, %r2, %r1;
        @%p1 bra OUT;
        add.s32 %r3, %r3, %r2;
        add.s32 %r2, %r2, 1;
        bra AGAIN;
        OUT:
        bar.warp.sync -1;
        shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
        cvt.u64.u32 %rd9, %r4;
        st.global.b64 [%rd3], %rd9;
        """
    )
    sums = [sum(range(n)) for n in range(32)]
    assert found.tolist() == [sums[n ^ 1] for n in range(32)]


BARRIER = """
        mov.b32 %r5, __dynamic_shmem__0;
        shl.b32 %r6, %r1, 2;
        add.s32 %r7, %r5, %r6;
        st.volatile.shared::cta.u32 [%r7], %r1;
        {wait}
        xor.b32 %r8, %r6, 252;
        add.s32 %r9, %r5, %r8;
        ld.volatile.shared::cta.u32 %r10, [%r9];
        cvt.u64.u32 %rd9, %r10;
        st.global.b64 [%rd3], %rd9;
"""


@pytest.mark.parametrize("seed", range(5))
def test_a_barrier_joins_warps(seed: int) -> None:
    found = run(BARRIER.format(wait="bar.sync 0;"), threads=64, seed=seed)
    assert found.tolist() == [n ^ 63 for n in range(64)]


def test_without_the_barrier_some_schedule_reads_too_early() -> None:
    results = [run(BARRIER.format(wait=""), threads=64, seed=s).tolist() for s in range(5)]
    assert any(found != [n ^ 63 for n in range(64)] for found in results)


COPY = """
        mov.b32 %r5, __dynamic_shmem__0;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra SKIP;
        mov.b32 %r6, 1;
        mbarrier.init.shared.b64 [%r5], %r6;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], {num_bytes};
        add.s32 %r7, %r5, 128;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd1], 256, [%r5];
        SKIP:
        bar.warp.sync -1;
        WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0;
        @%p2 bra DONE;
        bra WAIT;
        DONE:
        shl.b32 %r8, %r1, 3;
        add.s32 %r9, %r5, %r8;
        ld.volatile.shared::cta.b64 %rd8, [%r9+128];
        add.s64 %rd9, %rd8, 5;
        st.global.b64 [%rd3], %rd9;
"""


def test_a_copy_has_ended_when_its_barrier_says_so() -> None:
    for seed in range(5):
        assert run(COPY.format(num_bytes=256), seed=seed).tolist() == [5] * 32


@pytest.mark.parametrize("num_bytes", [128, 272])
def test_other_bytes_than_expected_never_complete(num_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr("ptx_machine.PATIENCE", 200)
    with pytest.raises(Deadlock, match="small_0 CTA 0 warp 0"):
        run(COPY.format(num_bytes=num_bytes))


def test_an_unknown_instruction_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"brev\.b32"):
        run("brev.b32 %r9, %r1;")


def test_the_text_is_taken_apart() -> None:
    body = "{ .reg .pred p; setp.eq.s32 p, %r1, 0;\n@p bra DONE;\nadd.s32 %r2, %r2, 1; DONE: }\n"
    kinds = [kind for kind, _ in pieces(body)]
    assert kinds == ["open", *["statement"] * 4, "label", "close"]
    assert split_operands("{%r1, %r2}, [%rd1, {%r3, %r4}], 7") == (
        "{%r1, %r2}",
        "[%rd1, {%r3, %r4}]",
        "7",
    )
    # The same local names twice do not meet.
    program = parse(f".entry twice_0()\n{{\n{body}{body}ret;\n}}\n")
    guards = [ins.guard for ins in program.instructions if ins.guard]
    assert len(guards) == len(set(guards)) == len(program.labels) == 2
    assert SHARED_BASE % 1024 == 0
