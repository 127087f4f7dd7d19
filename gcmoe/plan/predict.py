"""The time of one layer, predicted from its plan, a GPU's facts and few constants.

    time = edges + dispatch + stream + hop + link + tail + finalize

    dispatch   first CTA's start until the first blocks lie in the ring: fixed + staging (elements
               per dispatch SM) + sorting (entries) + half of the first wave's rows (per SM) + wire
    stream     the p-norm of memory time and consumer time
               memory: (bytes of touched experts - bytes guessed during dispatch) / read rate
               consumer: items / SMs, each of units * (decode + columns * width) + epilogue; SMs
               of dispatch count for the part of the stream after dispatch where compute returns
               to them
    hop        W1 -> W2 through memory, where W1 is too short to hide it
    link       what the rows to the peers need beyond the part of the stream that is W2
    tail       half a W2 item: tickets balance the ends of the CTAs to that
    finalize   fixed + combine slots and y of its last pass at the read rate + wire

Constants are those of :class:`Constants`; :mod:`gcmoe.plan.fit` derives them from the records of
one model and :mod:`gcmoe.plan.fitted` holds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcmoe.config import MoEConfig
from gcmoe.plan.gpus import Gpu, get_gpu
from gcmoe.plan.layer import ONE_PASS_TOKENS, LayerPlan
from gcmoe.plan.routing import Routing, expected_routing
from gcmoe.protocol.order import W1_COLUMNS, W2_COLUMNS

UNIT_COLUMNS = 256
"""K columns of a unit of weights; it has 256 rows."""
UNIT_BYTES = 34_816
"""A unit: 256 x 256 MXFP4 codes with their scales (gcmoe.numerics.packing_sm90)."""
EPILOGUES = {8: 0.50, 32: 0.85}
"""Microseconds of a W1 epilogue by width; between and beyond on a line. H200, 2026-11-29."""
W2_EPILOGUE_US = 0.25
LATE_START_US = 2.9
"""An edge inside a context (0.6) and the first weights of a CTA (2.3), H200, 2026-11-29."""
ROW_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Constants:
    """What the model needs beside facts; microseconds and nanoseconds at H200's clock.

    Args:
        edges_us: graph edges into the layer and out of it.
        dispatch_us: dispatch of a token, first CTA's start to the first full block.
        stage_ns: to quantise and stage one element, per dispatch SM.
        sort_ns: to sort one entry; every dispatch CTA sorts all.
        pull_ns: to pull one row into the ring, per dispatch SM.
        unit_ns: decode and issue of one unit, by consumer warpgroups.
        column_ns: a unit's time per token column, by consumer warpgroups.
        read_share: memory rate of the stream over the GPU's read rate.
        norm: p of the p-norm of memory and consumer time; large is "the longer one counts".
        hop_us: W1 -> W2 through memory.
        finalize_us: from the last CTA's end to y, without tokens.
        wire_us: what a peer adds to dispatch, and again to finalize: a flag over the link, and
            waiting for the slowest rank.
    """

    edges_us: float
    dispatch_us: float
    stage_ns: float
    sort_ns: float
    pull_ns: float
    unit_ns: dict[int, float]
    column_ns: dict[int, float]
    read_share: float
    norm: float
    hop_us: float
    finalize_us: float
    wire_us: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Microseconds by part, and what they come from.

    Args:
        routing: expected load of a rank.
        weight_bytes: read from memory.
        guessed_bytes: of these, read while dispatch runs.
        floor_us: weight bytes at the GPU's read rate, as records state it: without row scales and
            padding.
        edges_us, dispatch_us, stream_us, hop_us, link_us, tail_us, finalize_us: the parts.
        memory_us, consumer_us: what the stream is the p-norm of.
    """

    routing: Routing
    weight_bytes: float
    guessed_bytes: float
    floor_us: float
    edges_us: float
    dispatch_us: float
    memory_us: float
    consumer_us: float
    stream_us: float
    hop_us: float
    link_us: float
    tail_us: float
    finalize_us: float

    @property
    def total_us(self) -> float:
        return (
            self.edges_us
            + self.dispatch_us
            + self.stream_us
            + self.hop_us
            + self.link_us
            + self.tail_us
            + self.finalize_us
        )


@dataclass(frozen=True, slots=True)
class Tiling:
    """Items of a block and units of an item."""

    w1_tiles: int
    w1_units: int
    w2_tiles: int
    w2_units: int

    @classmethod
    def of(cls, plan: LayerPlan) -> Tiling:
        h, i = plan.config.hidden, plan.config.intermediate
        return cls(i // W1_COLUMNS, h // UNIT_COLUMNS, h // W2_COLUMNS, -(-i // UNIT_COLUMNS))

    @property
    def expert_units(self) -> int:
        return self.w1_tiles * self.w1_units + self.w2_tiles * self.w2_units


def mxfp4_bytes(config: MoEConfig) -> float:
    """Bytes of one expert in a checkpoint: codes of 4 bits, and a scale byte for 32 of them."""
    return 3 * config.hidden * config.intermediate * (1 / 2 + 1 / 32)


def floor_us(config: MoEConfig, touched: float, gpu: Gpu) -> float:
    """Microseconds to read the MXFP4 bytes of ``touched`` experts."""
    return touched * mxfp4_bytes(config) / gpu.read_rate * 1e6


def expert_bytes(plan: LayerPlan) -> int:
    """Packed bytes of one expert: units, a zero block where W2 has an odd number of windows, and
    row scales."""
    h, i = plan.config.hidden, plan.config.intermediate
    return Tiling.of(plan).expert_units * UNIT_BYTES + (2 * i + h) * ROW_SCALE_BYTES


def w1_epilogue_us(width: float) -> float:
    """Of one item, by its width."""
    (low, at_low), (high, at_high) = sorted(EPILOGUES.items())
    return at_low + (at_high - at_low) * (width - low) / (high - low)


def unit_us(plan: LayerPlan, gpu: Gpu, constants: Constants, width: float) -> float:
    """Consumer time of one unit. Where a GPU's tensor cores are slower than H200's, the difference
    of the data-sheet rates is added per column."""
    groups = plan.tiles.warpgroups
    known = constants.unit_ns
    nearest = groups if groups in known else min(known, key=lambda g: abs(g - groups))
    slower = gpu.column_ns - get_gpu("H200").column_ns
    column = constants.column_ns[nearest] + max(0.0, slower)
    return (known[nearest] + column * width) / 1000


def dispatch_us(plan: LayerPlan, routing: Routing, num_tokens: int, c: Constants) -> float:
    """Until the blocks of the first wave of items are full, in the mean."""
    config, sms = plan.config, plan.dispatch_sms
    first_blocks = min(routing.num_blocks, plan.compute_sms / (config.intermediate // W1_COLUMNS))
    first_rows = routing.rows * first_blocks / routing.num_blocks
    wire = c.wire_us if plan.num_ranks > 1 else 0.0
    staged = num_tokens * config.hidden / sms * c.stage_ns
    pulled = first_rows / 2 / sms * c.pull_ns
    return c.dispatch_us + wire + (staged + routing.rows * c.sort_ns + pulled) / 1000


def guessed_bytes(plan: LayerPlan, routing: Routing) -> float:
    """Weights that lie in shared memory when the first rows come, and are the right ones.

    A CTA's guess holds when each expert up to its own has exactly one block.
    """
    tiling, right = Tiling.of(plan), 0.0
    stages: int = plan.tiles.stages
    for cta in range(plan.compute_sms):
        block = cta // tiling.w1_tiles
        if block < plan.workspace.local_experts:
            right += routing.one_block ** (block + 1)
    return right * min(stages, tiling.w1_units) * UNIT_BYTES


def consumer_us(
    plan: LayerPlan, gpu: Gpu, routing: Routing, constants: Constants, sms: float
) -> float:
    """Time of the consumers of one of ``sms`` SMs when weights never make them wait.

    Items beyond one per SM spread evenly; fewer still take the time of one.
    """
    if not gpu.decodes:
        return 0.0
    tiling = Tiling.of(plan)
    total = 0.0
    for tiles, units, epilogue in (
        (tiling.w1_tiles, tiling.w1_units, w1_epilogue_us),
        (tiling.w2_tiles, tiling.w2_units, lambda width: W2_EPILOGUE_US),
    ):
        work = sum(
            count * tiles * (units * unit_us(plan, gpu, constants, width) + epilogue(width))
            for width, count in routing.blocks.items()
        )
        total += work / min(sms, routing.num_blocks * tiles)
    return total


def link_us(plan: LayerPlan, gpu: Gpu, routing: Routing, stream_us: float) -> float:
    """BF16 rows go to their source ranks while W2 runs: what is left of that behind it."""
    tiling = Tiling.of(plan)
    w2_share = tiling.w2_tiles * tiling.w2_units / tiling.expert_units
    remote = routing.rows * (plan.num_ranks - 1) / plan.num_ranks * plan.config.hidden * 2
    return max(0.0, remote / gpu.link_rate * 1e6 - stream_us * w2_share)


def late_share(plan: LayerPlan, routing: Routing, stream_us: float, c: Constants) -> float:
    """The part of the stream during which compute runs on the SMs of dispatch too: after all rows
    are pulled and compute has started there."""
    pulled = routing.rows / plan.dispatch_sms * c.pull_ns / 1000
    return max(0.0, 1 - (pulled + LATE_START_US) / stream_us)


def p_norm(first: float, second: float, p: float) -> float:
    """(first^p + second^p)^(1/p), without overflow."""
    longer, shorter = max(first, second), min(first, second)
    return float(longer * (1 + (shorter / longer) ** p) ** (1 / p))


def predict(plan: LayerPlan, gpu: Gpu, num_tokens: int, constants: Constants) -> Prediction:
    """The prediction for a call of ``num_tokens`` tokens on every rank.

    Raises:
        ValueError: ``num_tokens`` is not in [1, max_tokens].
    """
    config, c = plan.config, constants
    routing = expected_routing(plan, num_tokens)
    plan = plan.for_tokens(num_tokens)
    tiling = Tiling.of(plan)
    weight_bytes = routing.touched * expert_bytes(plan)
    guessed = guessed_bytes(plan, routing)
    memory = (weight_bytes - guessed) / (gpu.read_rate * c.read_share) * 1e6
    consumer = consumer_us(plan, gpu, routing, c, plan.compute_sms)
    stream = p_norm(memory, consumer, c.norm)
    if plan.late_ctas:
        sms = plan.compute_sms + plan.late_ctas * late_share(plan, routing, stream, c)
        consumer = consumer_us(plan, gpu, routing, c, sms)
        stream = p_norm(memory, consumer, c.norm)
    is_short = routing.num_blocks * tiling.w1_tiles < 2 * plan.compute_sms
    unit = unit_us(plan, gpu, c, routing.mean_width) if gpu.decodes else 0.0
    passes = plan.workspace.arrivals.groups if num_tokens > ONE_PASS_TOKENS else 1
    summed = num_tokens * (config.top_k + 1) * config.hidden * 2 / passes
    wire = c.wire_us if plan.num_ranks > 1 else 0.0
    return Prediction(
        routing=routing,
        weight_bytes=weight_bytes,
        guessed_bytes=guessed,
        floor_us=floor_us(config, routing.touched, gpu),
        edges_us=c.edges_us,
        dispatch_us=dispatch_us(plan, routing, num_tokens, c),
        memory_us=memory,
        consumer_us=consumer,
        stream_us=stream,
        hop_us=c.hop_us if is_short else 0.0,
        link_us=link_us(plan, gpu, routing, stream),
        tail_us=(tiling.w2_units * unit + W2_EPILOGUE_US) / 2,
        finalize_us=c.finalize_us + wire + summed / gpu.read_rate * 1e6,
    )
