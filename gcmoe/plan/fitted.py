"""Constants of the model, written by ``python -m gcmoe.plan.fit --write``."""

from gcmoe.plan.predict import Constants

RECORDS = (
    "ep2-r2-20261130T232750Z.json",
    "sustained-20261130T230151Z.json",
)  # fmt: skip
"""In ``bench/results``: what the constants were derived from."""

CONSTANTS = Constants(
    edges_us=1.7852,
    dispatch_us=5.7517,
    stage_ns=0.070758,
    sort_ns=1.5752,
    pull_ns=138.92,
    unit_ns={2: 717.2, 4: 548.62},
    column_ns={2: 12.947, 4: 15.941},
    read_share=1.0205,
    norm=7.0069,
    hop_us=1.0211,
    finalize_us=3.2357,
    wire_us=2.9844,
)
