"""Constants of the model, written by ``python -m gcmoe.plan.fit --write``."""

from gcmoe.plan.predict import Constants

RECORDS = (
    "speed-deepseek-v4-flash-20261129T232905Z.json",
)  # fmt: skip
"""In ``bench/results``: what the constants were derived from."""

CONSTANTS = Constants(
    edges_us=5.3489,
    dispatch_us=9.0956,
    stage_ns=0.069738,
    sort_ns=1.4958,
    pull_ns=139.8,
    unit_ns={2: 632.2, 4: 691.58},
    column_ns={2: 13.157, 4: 9.222},
    read_share=1.0002,
    norm=8.5538,
    hop_us=2.319,
    finalize_us=4.084,
    wire_us=1.2,
)
