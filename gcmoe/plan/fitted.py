"""Constants of the model, written by ``python -m gcmoe.plan.fit --write``."""

from gcmoe.plan.predict import Constants

RECORDS = (
    "ep2-r2-20261130T154003Z.json",
    "peers-20261130T153344Z.json",
)  # fmt: skip
"""In ``bench/results``: what the constants were derived from."""

CONSTANTS = Constants(
    edges_us=2.0319,
    dispatch_us=6.4028,
    stage_ns=0.069783,
    sort_ns=1.5416,
    pull_ns=138.95,
    unit_ns={2: 712.3, 4: 600.58},
    column_ns={2: 12.347, 4: 14.134},
    read_share=1.0201,
    norm=8.2754,
    hop_us=1.3506,
    finalize_us=3.4477,
    wire_us=2.1565,
)
