"""The model of a layer's time: what it is made of, and how well it meets measurements."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcmoe.models import MODELS, share
from gcmoe.numerics import packed_layout
from gcmoe.plan import fit as fitting
from gcmoe.plan import make_plan
from gcmoe.plan.fitted import CONSTANTS, RECORDS
from gcmoe.plan.gpus import GPUS, get_gpu
from gcmoe.plan.layer import capacity_for
from gcmoe.plan.predict import (
    UNIT_BYTES,
    Tiling,
    consumer_us,
    expert_bytes,
    guessed_bytes,
    predict,
    unit_us,
)
from gcmoe.plan.routing import binomial, expected_routing

H200 = get_gpu("h200")
ALL_ROWS = fitting.read_records()
HELD_OUT = ("deepseek-v4.1-flash", "glm-5.2")
COMPARED = [
    row for model in HELD_OUT for row in fitting.newest(ALL_ROWS, model) if row.num_tokens >= 8
]
MAX_ERROR = 0.10


def share_plan(name: str, num_tokens: int, ranks: int = 1):
    model = share(name, 8)
    model = replace(model, num_experts=model.num_experts * ranks)
    return make_plan(model.config(capacity_for(num_tokens)), ranks)


# ------------------------------------------------------------------------------- against records


def test_there_are_records_to_compare_with():
    measured = {row.num_tokens for row in COMPARED if row.model == "deepseek-v4.1-flash"}
    assert len(measured) >= 5, "no full record of DeepSeek-V4.1-Flash on H200 in bench/results"


@pytest.mark.parametrize(
    "row", COMPARED, ids=lambda row: f"{row.model}-{row.plan.num_ranks}-{row.num_tokens}"
)
def test_prediction_is_within_ten_percent_of_what_was_measured(row):
    time = predict(row.plan, H200, row.num_tokens, CONSTANTS).total_us
    assert abs(time / row.median_us - 1) <= MAX_ERROR, (time, row.median_us)


def test_constants_come_from_the_newest_records_of_one_model():
    """``make fit`` derives them again."""
    rows = fitting.newest(ALL_ROWS, fitting.FITTED_MODEL)
    assert tuple(sorted({row.record for row in rows})) == RECORDS, "run make fit"
    assert {row.model for row in rows} == {"deepseek-v4-flash"}
    again = fitting.rounded(fitting.fit(rows, H200))
    assert asdict(again).keys() == asdict(CONSTANTS).keys()
    for name, value in asdict(again).items():
        assert value == pytest.approx(asdict(CONSTANTS)[name], rel=1e-3), f"{name}: run make fit"


def test_constants_stay_near_their_sources():
    """The fit moves no constant by more than three of its uncertainties."""
    for name, (prior, uncertainty) in fitting.PRIORS.items():
        found = getattr(CONSTANTS, name)
        for value in found.values() if isinstance(found, dict) else [found]:
            assert abs(math.log(value / prior)) <= 3 * uncertainty, name


# -------------------------------------------------------------------------------------- routing


@given(st.integers(1, 400), st.floats(0.001, 0.999))
def test_binomial_is_a_distribution(trials, chance):
    found = binomial(trials, chance)
    assert sum(found) == pytest.approx(1, abs=1e-9)
    mean = sum(n * p for n, p in enumerate(found))
    assert mean == pytest.approx(trials * chance, rel=1e-9)
    assert binomial(trials, 1.0) == [0.0] * trials + [1.0]


@pytest.mark.parametrize(("name", "num_tokens", "ranks"), [
    ("deepseek-v4-flash", 4, 1), ("deepseek-v4.1-flash", 64, 1), ("glm-5.2", 256, 1),
    ("deepseek-v4-flash", 16, 4),
])  # fmt: skip
def test_expectations_agree_with_drawn_routings(name, num_tokens, ranks):
    plan = share_plan(name, num_tokens, ranks)
    expected = expected_routing(plan, num_tokens)
    rng = random.Random(5)
    experts, local = plan.config.num_experts, plan.workspace.local_experts
    touched = blocks = width = one_block = 0.0
    draws = 300
    for _ in range(draws):
        rows = [0] * experts
        for _ in range(num_tokens * ranks):
            for expert in rng.sample(range(experts), plan.config.top_k):
                rows[expert] += 1
        most = plan.tiles.max_width
        for count in rows[:local]:
            touched += count > 0
            one_block += 0 < count <= most
            full, rest = divmod(count, most)
            tiles = [most] * full + [min(w for w in plan.tiles.widths if rest <= w)] * (rest > 0)
            blocks += len(tiles)
            width += sum(tiles)
    assert expected.rows == pytest.approx(num_tokens * plan.config.top_k)
    assert expected.touched == pytest.approx(touched / draws, rel=0.02)
    assert expected.num_blocks == pytest.approx(blocks / draws, rel=0.02)
    assert expected.mean_width == pytest.approx(width / blocks, rel=0.03)
    assert expected.one_block == pytest.approx(one_block / draws / local, rel=0.03, abs=0.01)


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_tokens_must_fit_the_capacity(num_tokens):
    with pytest.raises(ValueError, match=f"tokens = {num_tokens}: from 1 to max_tokens = 8"):
        expected_routing(share_plan("glm-5.2", 8), num_tokens)


# ---------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_an_expert_are_those_of_the_packer(name):
    model = share(name, 8)
    plan = make_plan(model.config(8))
    layout = packed_layout(1, model.hidden, model.intermediate)
    packed = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
    assert expert_bytes(plan) == packed


cases = st.tuples(st.sampled_from(sorted(MODELS)), st.sampled_from([1, 2, 7, 16, 64, 200, 256]))


@given(cases, st.sampled_from(sorted(GPUS)))
def test_parts_add_up_and_keep_their_bounds(case, gpu_name):
    name, num_tokens = case
    gpu = get_gpu(gpu_name)
    plan = make_plan(share(name, 8).config(256), 1, gpu.sms)
    found = predict(plan, gpu, num_tokens, CONSTANTS)
    parts = [
        found.edges_us, found.dispatch_us, found.stream_us, found.hop_us, found.link_us,
        found.tail_us, found.finalize_us,
    ]  # fmt: skip
    assert min(parts) >= 0
    assert found.total_us == pytest.approx(sum(parts))
    assert found.stream_us >= max(found.memory_us, found.consumer_us)
    assert found.stream_us <= found.memory_us + found.consumer_us
    assert 0 <= found.guessed_bytes <= found.weight_bytes
    assert (found.consumer_us == 0) == (not gpu.decodes)
    assert found.link_us == 0  # one rank


@given(cases)
def test_more_tokens_take_longer_and_more_memory_is_faster(case):
    name, num_tokens = case
    plan = make_plan(share(name, 8).config(512))
    times = [predict(plan, H200, t, CONSTANTS).total_us for t in (num_tokens, 2 * num_tokens)]
    assert times[0] < times[1]
    faster = replace(H200, read_rate=2 * H200.read_rate)
    assert predict(plan, faster, num_tokens, CONSTANTS).total_us < times[0]


def test_a_guess_needs_every_expert_before_it_to_have_one_block():
    plan = share_plan("deepseek-v4-flash", 64)
    routing = expected_routing(plan, 64)
    most = plan.compute_sms * plan.tiles.stages * UNIT_BYTES
    assert guessed_bytes(plan, replace(routing, one_block=1.0)) == most
    assert guessed_bytes(plan, replace(routing, one_block=0.0)) == 0
    half = guessed_bytes(plan, replace(routing, one_block=0.5))
    tiles = plan.config.intermediate // 128
    by_cta = [0.5 ** (cta // tiles + 1) for cta in range(plan.compute_sms)]
    assert half == pytest.approx(sum(by_cta) * plan.tiles.stages * UNIT_BYTES)


def test_fewer_items_than_sms_take_the_time_of_one():
    plan = share_plan("deepseek-v4-flash", 1)
    routing = expected_routing(plan, 1)
    tiling = Tiling.of(plan)
    assert routing.num_blocks * tiling.w1_tiles < plan.compute_sms
    unit = unit_us(plan, H200, CONSTANTS, 8)
    one_of_each = (tiling.w1_units + tiling.w2_units) * unit + 0.5 + 0.25
    found = consumer_us(plan, H200, routing, CONSTANTS, plan.compute_sms)
    assert found == pytest.approx(one_of_each)


def test_compute_on_the_sms_of_dispatch_shortens_the_consumers():
    """By at most the share of SMs, and not when dispatch lasts as long as the stream."""
    config = share("deepseek-v4-flash", 8).config(256)
    alone, both = (make_plan(config, late_compute=late) for late in (False, True))
    times = [predict(plan, H200, 256, CONSTANTS).consumer_us for plan in (alone, both)]
    assert times[1] < times[0]
    assert times[1] > times[0] * both.compute_sms / both.num_sms
    slow = replace(CONSTANTS, pull_ns=1e6)
    times = [predict(plan, H200, 256, slow).consumer_us for plan in (alone, both)]
    assert times[0] == times[1]


def test_slower_tensor_cores_cost_their_share_of_each_column():
    plan = share_plan("deepseek-v4-flash", 64)
    h20, h100 = get_gpu("h20"), get_gpu("h100")
    for width in (8, 32):
        slower = unit_us(plan, h20, CONSTANTS, width) - unit_us(plan, H200, CONSTANTS, width)
        ratio = (H200.fp8_flops / H200.sms) / (h20.fp8_flops / h20.sms)
        wanted = width * H200.column_ns * (ratio - 1) / 1000
        assert slower == pytest.approx(wanted)
        assert unit_us(plan, h100, CONSTANTS, width) == unit_us(plan, H200, CONSTANTS, width)


def test_rows_to_peers_are_hidden_behind_w2_unless_the_link_is_slow():
    plan = share_plan("deepseek-v4-flash", 256, ranks=2)
    fast = predict(plan, H200, 256, CONSTANTS)
    assert fast.link_us == 0
    slow = replace(H200, link_rate=0.05e12)
    remote = fast.routing.rows / 2 * plan.config.hidden * 2 / slow.link_rate * 1e6
    assert predict(plan, slow, 256, CONSTANTS).link_us == pytest.approx(
        remote - fast.stream_us / 3, rel=1e-6
    )


def test_a_peer_adds_its_wire_to_dispatch_and_to_finalize():
    one, two = (predict(share_plan("glm-5.2", 8, ranks), H200, 8, CONSTANTS) for ranks in (1, 2))
    for part in ("dispatch_us", "finalize_us"):
        added = getattr(two, part) - getattr(one, part)
        assert added == pytest.approx(CONSTANTS.wire_us, abs=0.01), part


def test_every_gpu_and_constant_has_a_source():
    for gpu in GPUS.values():
        assert "data sheet" in gpu.sources
        assert 0.8 * gpu.hbm_peak < gpu.read_rate < gpu.hbm_peak
    assert set(fitting.PRIORS) == set(asdict(CONSTANTS))
    with pytest.raises(ValueError, match="gpu = 'A100': must be one of h200, h100"):
        get_gpu("A100")


# ---------------------------------------------------------------------------------------- the fit


def test_the_fit_recovers_constants_that_made_the_times():
    rows = fitting.newest(ALL_ROWS, fitting.FITTED_MODEL)
    truth = replace(
        CONSTANTS,
        column_ns={group: 1.4 * value for group, value in CONSTANTS.column_ns.items()},
        dispatch_us=CONSTANTS.dispatch_us + 2,
    )
    made = []
    for row in rows:
        found = predict(row.plan, H200, row.num_tokens, truth)
        phases = {"compute.first_block": found.dispatch_us, "compute.end": 90.0}
        phases["finalize.end"] = 90.0 + found.finalize_us
        made.append(replace(row, median_us=found.total_us, phases=phases))
    again = fitting.fit(made, H200)
    for row in made:
        time = predict(row.plan, H200, row.num_tokens, again).total_us
        assert time == pytest.approx(row.median_us, rel=0.02)
    assert again.dispatch_us == pytest.approx(truth.dispatch_us, abs=0.7)
    wide = max(truth.column_ns)
    assert again.column_ns[wide] > CONSTANTS.column_ns[wide]


def test_the_file_of_constants_is_what_the_fit_writes():
    wanted = fitting.fitted_text(CONSTANTS, RECORDS)
    assert fitting.OUTPUT.read_text(encoding="utf-8") == wanted


def test_only_rows_of_the_fitted_model_are_accepted():
    others = [row for row in ALL_ROWS if row.model != fitting.FITTED_MODEL]
    for rows in ([], others):
        with pytest.raises(ValueError, match="rows of deepseek-v4-flash and no others"):
            fitting.fit(rows, H200)


ROW = {
    "model": "glm-5.2", "impl": "gcmoe", "variant": "default", "correct": True, "median_us": 100.0,
    "ranks": 2, "share_of": 8, "tokens_per_rank": 16, "floor_us": 80.0,
    "plan": {"dispatch_sms": 24, "tiles": {
        "widths": [8, 16, 24, 32], "warpgroups": 2, "subtiles": 2, "stages": 4,
        "producer_registers": 40, "consumer_registers": 232,
    }},
}  # fmt: skip


def test_rows_are_read_as_recorded():
    row = fitting.measured_of(ROW, "name.json", "2026-11-30T00:00:00Z")
    assert row is not None
    assert (row.plan.config.num_experts, row.plan.num_ranks) == (64, 2)
    assert (row.plan.dispatch_sms, row.plan.tiles.warpgroups, row.plan.tiles.stages) == (24, 2, 4)
    assert row.plan.config.max_tokens == 16
    assert row.plan.late_ctas == 0
    later = fitting.measured_of({**ROW, "fingerprint": {"late_compute": "True"}}, "name.json", "")
    assert later is not None
    assert later.plan.late_ctas == 24


@pytest.mark.parametrize(
    "change", [{"impl": "humming_w4a8"}, {"variant": "serial"}, {"correct": False},
               {"median_us": None}],
)  # fmt: skip
def test_rows_of_others_and_failed_rows_are_left_out(change):
    assert fitting.measured_of({**ROW, **change}, "name.json", "") is None


def test_the_newest_full_record_counts(tmp_path: Path):
    def write(name: str, created: str, count: int, gpu: str = "NVIDIA H200") -> None:
        rows = [{**ROW, "tokens_per_rank": n + 1} for n in range(count)]
        record = {"gpu": gpu, "created": created, "rows": rows}
        (tmp_path / name).write_text(json.dumps(record))

    write("a.json", "2026-11-02T00:00:00Z", 6)
    write("b.json", "2026-11-01T00:00:00Z", 7)
    write("c.json", "2026-11-03T00:00:00Z", 3)
    write("d.json", "2026-11-04T00:00:00Z", 8, "NVIDIA H20")
    rows = fitting.read_records(tmp_path)
    assert len(rows) == 16
    assert {row.record for row in fitting.newest(rows, "glm-5.2")} == {"a.json"}
    alone = [{**ROW, "tokens_per_rank": n + 1, "ranks": 1} for n in range(6)]
    record = {"gpu": "NVIDIA H200", "created": "2026-10-01T00:00:00Z", "rows": alone}
    (tmp_path / "e.json").write_text(json.dumps(record))
    rows = fitting.read_records(tmp_path)
    assert {row.record for row in fitting.newest(rows, "glm-5.2")} == {"a.json", "e.json"}
    assert fitting.newest(rows, "deepseek-v4-pro") == []


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_minimise_finds_the_minimum(start):
    def function(x: list[float]) -> list[float]:
        return [x[0] - 1, 2 * (x[1] + 2), x[2] * 3 - 1.5, 0.1 * (x[0] - 1) ** 2]

    assert fitting.minimise(function, list(start)) == pytest.approx([1, -2, 0.5], abs=1e-4)
