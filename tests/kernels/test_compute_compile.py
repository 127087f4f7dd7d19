"""What the compiler made of the compute kernel: PTX and machine code, without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import compute_build
import pytest
from compiler_output import compile_kernel
from compute_build import Build

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import dsl_version, kernel_class, parameter_size, ptx_entries
from gcmoe.kernels.spec import kernel_spec
from gcmoe.plan import make_plan
from gcmoe.protocol import Role

ARCH = "sm_90a"
SHARED_BYTES = 232_448
REGISTER_FILE = 65_536

CASES: dict[str, tuple[MoEConfig, int, bool]] = {
    "v4-flash-8": (MoEConfig(4096, 2048, 32, 6, 8, 10.0), 1, False),
    "v4-flash-64": (MoEConfig(4096, 2048, 32, 6, 64, 10.0), 1, False),
    "v4-flash-256": (MoEConfig(4096, 2048, 32, 6, 256, 10.0), 1, False),
    "v4.1-flash-256": (MoEConfig(5120, 2304, 48, 6, 256, 10.0), 1, False),
    "v4-flash-64-trace": (MoEConfig(4096, 2048, 32, 6, 64, 10.0), 1, True),
    "glm-5.2-256-trace": (MoEConfig(6144, 2048, 32, 8, 256, None), 1, True),
    "v4.1-flash-64-ep8": (MoEConfig(5120, 2304, 384, 6, 64, 10.0), 8, False),
    "odd-windows-ep2": (MoEConfig(512, 384, 6, 3, 33, None), 2, False),
}

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(dsl_version() is None, reason="nvidia-cutlass-dsl is not installed"),
]


@cache
def build(name: str) -> Build:
    config, ranks, trace = CASES[name]
    return Build.of(kernel_spec(make_plan(config, ranks), Role.COMPUTE, ARCH, trace=trace))


every = pytest.mark.parametrize("name", CASES)


def test_without_prefetch_no_weights_are_guessed() -> None:
    name = "odd-windows-ep2"
    config, ranks, _ = CASES[name]
    spec = kernel_spec(make_plan(config, ranks), Role.COMPUTE, ARCH, prefetch=False)
    kernel = kernel_class(Role.COMPUTE)(spec)
    ptx, _ = compile_kernel(kernel, ARCH)
    guesses = min(spec.tiles.stages, config.hidden // 256)
    assert build(name).ptx.count("cp.async.bulk.shared") - ptx.count("cp.async.bulk.shared") == (
        guesses
    )


@every
def test_nothing_spills(name: str) -> None:
    b = build(name)
    assert b.usage["STACK"] == b.usage["LOCAL"] == 0, b.usage
    assert re.findall(r"\b(?:LDL|STL)\b.*", b.sass) == []


@every
def test_registers_and_shared_memory_fit(name: str) -> None:
    b = build(name)
    tiles = b.spec.tiles
    assert b.smem_bytes <= SHARED_BYTES
    assert b.usage["REG"] * b.threads <= REGISTER_FILE
    # setmaxnreg hands on what the producers give up and may not exceed what was launched with.
    after = 128 * tiles.producer_registers + 128 * tiles.warpgroups * tiles.consumer_registers
    assert after <= b.usage["REG"] * b.threads
    assert b.threads == 128 * (tiles.warpgroups + 1)


# ------------------------------------------------------------------------------- the main loop


@dataclass(frozen=True)
class Loop:
    """A main loop: instruction lines from its label to its closing branch."""

    width: int
    products: int
    body: list[str]


QGMMA = re.compile(r"\bQGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3 R\d+, (\S+), ")
BRANCH = re.compile(r"\bBRA\S* .*`\((\.L\w*)\)")


def main_loops(sass: str) -> list[Loop]:
    """The loops around QGMMAs, one for each token width."""
    lines = sass.splitlines()
    labels = {m[1]: n for n, line in enumerate(lines) if (m := re.match(r"(\.L\w*):", line))}
    places: dict[int, list[int]] = {}
    for n, line in enumerate(lines):
        if match := QGMMA.search(line):
            places.setdefault(int(match[1]), []).append(n)
    loops = []
    for width, found in sorted(places.items()):
        first, last = found[0], found[-1]
        for n in range(last + 1, len(lines)):
            match = BRANCH.search(lines[n])
            if match and labels[match[1]] <= first:
                loops.append(Loop(width, len(found), lines[labels[match[1]] : n + 1]))
                break
        else:
            pytest.fail(f"width {width}: no branch behind line {last + 1} goes back over {first}")
    return loops


@every
def test_one_main_loop_per_width(name: str) -> None:
    b = build(name)
    loops = main_loops(b.sass)
    assert [loop.width for loop in loops] == list(b.spec.tiles.widths)
    # Two blocks of four k32 steps, for each sub-tile of a warpgroup.
    assert {loop.products for loop in loops} == {8 * b.spec.tiles.subtiles}


@every
def test_weights_come_from_registers(name: str) -> None:
    operands = [match[2] for match in QGMMA.finditer(build(name).sass)]
    assert operands
    assert [a for a in operands if not re.fullmatch(r"R\d+", a)] == []
    assert "HGMMA" not in build(name).sass


@every
def test_main_loops_keep_uniform_registers(name: str) -> None:
    """A divergent wait would move addresses through R2UR (measured +10 % consumer time on H200)."""
    for loop in main_loops(build(name).sass):
        moved = [line.strip() for line in loop.body if re.search(r"\bR2UR\b", line)]
        assert moved == [], f"width {loop.width}"


@every
def test_consumers_pass_no_fence_in_a_main_loop(name: str) -> None:
    """A fence waits for the loads of the next unit too (measured 5 % of the consumers' time)."""
    for loop in main_loops(build(name).sass):
        fences = [line.strip() for line in loop.body if re.search(r"\b(?:MEMBAR|FENCE)\b", line)]
        assert fences == [], f"width {loop.width}"


@every
def test_who_refills_a_stage_has_fenced(name: str) -> None:
    """Between the wait for its readers and the loads, by the thread that issues them."""
    marked = [
        line.strip()
        for line in build(name).ptx.splitlines()
        if re.search(r"\bmbarrier\.|\bcp\.async\.bulk\.|// gcmoe stage read", line)
    ]
    fences = [n for n, line in enumerate(marked) if line.endswith("stage read")]
    assert len(fences) == 3  # weights, rows of W1, rows of W2
    for n in fences:
        assert "expect_tx" in marked[n + 1]
        assert "cp.async.bulk" in marked[n + 2]


# ------------------------------------------------------------------------------------- the PTX


@every
def test_it_is_counted_and_releases_finalize_behind_the_end_of_dispatch(name: str) -> None:
    """PTX demands the wait of a kernel behind a programmatic edge."""
    ptx = build(name).ptx
    order = ("griddepcontrol.wait;", "compute_done write", "griddepcontrol.launch_dependents;")
    assert [ptx.count(text) for text in order] == [1, 1, 1]
    places = [ptx.index(text) for text in order]
    assert places == sorted(places)


@every
def test_parameters_are_those_of_the_spec(name: str) -> None:
    b = build(name)
    ranks = b.spec.shape.num_ranks
    wanted = [parameter_size(parameter, ranks) for parameter in b.spec.parameters]
    assert ptx_entries(b.ptx) == {b.spec.symbol: wanted}


@every
def test_no_read_only_loads_and_no_weak_completion(name: str) -> None:
    compute_build.assert_no_read_only_loads_and_no_weak_completion(build(name).ptx)


OPERATIONS = {
    **compute_build.OPERATIONS,
    # A weight stage read by ordinary loads is refilled by the async proxy.
    "stage read": {"fence.proxy.async.shared::cta"},
}


@pytest.mark.parametrize("mark", OPERATIONS)
@every
def test_edges_have_the_operations_of_the_table(name: str, mark: str) -> None:
    assert build(name).operations(mark) == OPERATIONS[mark]


@every
def test_publication_keeps_its_order(name: str) -> None:
    compute_build.assert_publication_keeps_its_order(build(name).marks())


@every
def test_no_operation_without_a_place_in_the_table(name: str) -> None:
    known = {*OPERATIONS, "abort", "fault"}
    assert {mark for mark, _ in build(name).marks()} <= known


@every
def test_warp_collectives_are_not_duplicated(name: str) -> None:
    """The compiler does not know that they are convergent."""
    b = build(name)
    groups = b.spec.tiles.max_width // 32 + (b.spec.tiles.max_width % 32 > 0)
    assert b.ptx.count("match.any.sync") == (0 if b.spec.shape.num_ranks == 1 else groups)
    assert b.ptx.count("vote.sync.ballot") == 1


def test_trace_costs_nothing_when_off() -> None:
    """Without trace the address of the records is not even loaded, nor a counter of items kept."""
    off, on = build("v4-flash-64"), build("v4-flash-64-trace")
    index = [p.name for p in off.spec.parameters].index("trace")
    loads = [b.ptx.count(f"[{b.spec.symbol}_param_{index}]") for b in (off, on)]
    assert loads[0] == 0 < loads[1]
    assert "%smid" not in off.ptx
    assert "%smid" in on.ptx
    assert "traced" not in kernel_class(Role.COMPUTE)(off.spec).fields
