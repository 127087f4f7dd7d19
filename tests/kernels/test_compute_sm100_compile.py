"""What the compiler made of the Blackwell compute kernel, for every target, without a GPU."""

from __future__ import annotations

import re
from functools import cache

import compute_build
import pytest
from ptx_values import Values

from gcmoe.config import MoEConfig
from gcmoe.kernels import layout_sm100 as layout
from gcmoe.kernels.build import dsl_version, parameter_size, ptx_entries
from gcmoe.kernels.spec import kernel_spec
from gcmoe.plan import make_plan
from gcmoe.protocol import Role

SHARED_BYTES = 232_448
TENSOR_COLUMNS = 512
REGISTER_FILE = 65_536

FLASH = MoEConfig(5120, 2304, 384, 6, 64, 10.0)
# (layer, ranks, target, trace): every target, every tile plan, one rank and several, no clamp.
CASES: dict[str, tuple[MoEConfig, int, str, bool]] = {
    "narrow-sm_100a": (FLASH, 8, "sm_100a", False),
    "narrow-sm_100f": (FLASH, 8, "sm_100f", False),
    "narrow-sm_103a": (FLASH, 8, "sm_103a", False),
    "medium-sm_103a": (MoEConfig(5120, 2304, 384, 6, 256, 10.0), 8, "sm_103a", False),
    "wide-sm_100f": (MoEConfig(5120, 2304, 384, 6, 512, 10.0), 8, "sm_100f", False),
    "wide-sm_103a": (MoEConfig(5120, 2304, 384, 6, 512, 10.0), 8, "sm_103a", False),
    "small-ep1-sm_100a": (MoEConfig(256, 128, 6, 3, 33, None), 1, "sm_100a", False),
    "trace-sm_103a": (FLASH, 8, "sm_103a", True),
}
WIDTHS = {"narrow": 32, "medium": 64, "wide": 128, "small": 32, "trace": 32}

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(dsl_version() is None, reason="nvidia-cutlass-dsl is not installed"),
]


class Build(compute_build.Build):
    """With what only Blackwell has."""

    def count(self, opcode: str) -> int:
        """Instructions of the machine code whose name begins with ``opcode``."""
        return len(re.findall(rf"\b{re.escape(opcode)}\b", self.sass))

    @property
    def memory(self) -> layout.TensorMemory:
        tiles = self.spec.tiles
        return layout.TensorMemory(tiles.max_width, tiles.stages, tiles.accumulators)


@cache
def build(name: str) -> Build:
    config, ranks, arch, trace = CASES[name]
    plan = make_plan(config, ranks, 148, family="sm100")
    return Build.of(kernel_spec(plan, Role.COMPUTE, arch, trace=trace))


every = pytest.mark.parametrize("name", CASES)


# ------------------------------------------------------------------------------- what it takes


@every
def test_nothing_spills(name: str) -> None:
    b = build(name)
    assert b.usage["STACK"] == b.usage["LOCAL"] == 0, b.usage
    assert re.findall(r"\b(?:LDL|STL)\b.*", b.sass) == []


@every
def test_it_fits_an_sm(name: str) -> None:
    b = build(name)
    assert b.spec.tiles.max_width == WIDTHS[name.partition("-")[0]]
    assert b.smem_bytes <= SHARED_BYTES
    assert b.usage["REG"] * b.threads <= REGISTER_FILE
    assert b.memory.columns <= b.memory.allocated <= TENSOR_COLUMNS
    assert b.memory.allocated & (b.memory.allocated - 1) == 0


@every
def test_tensor_memory_is_allocated_and_freed_once(name: str) -> None:
    b = build(name)
    columns = b.memory.allocated
    assert re.findall(r"tcgen05\.alloc\.\S+ \[%\w+\], (\d+);", b.ptx) == [str(columns)]
    assert re.findall(r"tcgen05\.dealloc\.\S+ %\w+, (\d+);", b.ptx) == [str(columns)]
    assert b.ptx.count("tcgen05.relinquish_alloc_permit") == 1
    # A second CTA on the SM would wait for columns: shared memory keeps it away.
    assert 2 * b.smem_bytes > SHARED_BYTES


# --------------------------------------------------------------------------------- the MMAs


@every
def test_one_window_is_in_the_code_once(name: str) -> None:
    b = build(name)
    assert b.count("UTCQMMA") == len(layout.MMAS) == 8
    assert b.count("UTCCP.T.S.4x32dp128bit") == len(layout.COPIES) == 3
    # Of the stage and of the accumulators.
    assert b.count("UTCBAR") == 2
    # Gate and up, or both halves, for each kind of tile.
    assert b.count("LDTM.x8") == 4
    assert "UTCOMMA" not in b.sass


@every
def test_the_mma_is_block_scaled_fp4_by_fp8(name: str) -> None:
    kinds = set(re.findall(r"tcgen05\.mma\.\S+", build(name).ptx))
    assert kinds == {"tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32"}


@every
def test_no_register_is_used_before_its_load_has_ended(name: str) -> None:
    """The wait stands in the text of the loads, before anything that reads a register."""
    lines = [line.strip() for line in build(name).ptx.splitlines()]
    loads = [i for i, line in enumerate(lines) if line.startswith("tcgen05.ld")]
    assert len(loads) == 4
    for first, second in zip(loads[::2], loads[1::2], strict=True):
        assert second == first + 1
        assert lines[second + 1] == "tcgen05.wait::ld.sync.aligned;"
        # And the warp is brought together before the loads, which want it aligned.
        before = [line for line in lines[:first] if line.endswith(";")]
        while re.match(r"(add|or|mad|shl|mov|cvt)\.", before[-1]):
            before.pop()
        assert before[-1].startswith("bar.warp.sync"), before[-1]


@every
def test_warp_collectives_are_not_duplicated(name: str) -> None:
    """The compiler does not know that they are convergent."""
    b = build(name)
    groups = b.spec.tiles.max_width // 32
    assert b.ptx.count("match.any.sync") == (0 if b.spec.shape.num_ranks == 1 else groups)
    assert b.ptx.count("vote.sync.ballot") == 1
    assert b.ptx.count("redux.sync.max.u32") == 8


# ------------------------------------------------------------------------------- transactions


def expected_bytes(ptx: str) -> set[int | None]:
    """The byte counts of all expect_tx; None for one that depends on the item."""
    values = Values(ptx)
    found = re.findall(r"mbarrier\.arrive\.expect_tx\.\S+ _, \[%r\d+\], (\S+);", ptx)
    return {None if values.inputs(value) else values.value(value) for value in found}


@every
def test_transactions_are_the_packed_bytes(name: str) -> None:
    b = build(name)
    rows: set[int | None] = {layout.token_bytes(width) for width in b.spec.tiles.widths}
    routing_weights = 4 * b.spec.tiles.max_width
    # None: N rows of ``a`` and their atom.
    assert expected_bytes(b.ptx) == {layout.WEIGHT_BYTES, routing_weights, None} | rows


@every
def test_weight_loads(name: str) -> None:
    """The first windows by guess, all others by one place; codes by 2-D tensor loads."""
    b = build(name)
    guessed = min(b.spec.tiles.stages, b.spec.shape.hidden // layout.WINDOW)
    assert b.ptx.count("cp.async.bulk.tensor.2d") == guessed + 1
    assert b.ptx.count("cp.async.bulk.tensor.4d") == len(b.spec.tiles.widths)


# ------------------------------------------------------------------------------------- the PTX


@every
def test_parameters_are_those_of_the_spec(name: str) -> None:
    b = build(name)
    ranks = b.spec.shape.num_ranks
    wanted = [parameter_size(parameter, ranks) for parameter in b.spec.parameters]
    assert ptx_entries(b.ptx) == {b.spec.symbol: wanted}


@every
def test_finalize_is_released_once(name: str) -> None:
    assert build(name).ptx.count("griddepcontrol.launch_dependents;") == 1


@every
def test_the_target_is_the_one_asked_for(name: str) -> None:
    b = build(name)
    assert re.findall(r"^\.target (\w+)", b.ptx, re.MULTILINE) == [b.spec.arch]


@every
def test_no_read_only_loads_and_no_weak_completion(name: str) -> None:
    compute_build.assert_no_read_only_loads_and_no_weak_completion(build(name).ptx)


OPERATIONS = {**compute_build.OPERATIONS, "stage guess": {"fence.proxy.async.shared::cta"}}


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


def test_trace_costs_nothing_when_off() -> None:
    assert "%smid" not in build("narrow-sm_103a").ptx
    assert "%smid" in build("trace-sm_103a").ptx


def test_the_targets_differ_in_nothing_that_we_use() -> None:
    """One text serves B200 and B300: the MMAs of all targets are the same."""

    def opcodes(name: str) -> list[str]:
        return re.findall(r"\bUTC[\w.]+", build(name).sass)

    assert opcodes("narrow-sm_100a") == opcodes("narrow-sm_100f") == opcodes("narrow-sm_103a")
