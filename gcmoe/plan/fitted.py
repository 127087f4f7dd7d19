"""Constants of the model, written by ``python -m gcmoe.plan.fit --write``."""

from gcmoe.plan.predict import Constants

RECORDS = (
    "ep2-r2-20261130T232750Z.json",
    "sustained-20261201T030151Z.json",
)  # fmt: skip
"""In ``bench/results``: what the constants were derived from."""

CONSTANTS = Constants(
    edges_us=1.7457,
    dispatch_us=5.6441,
    stage_ns=0.070744,
    sort_ns=1.5781,
    pull_ns=138.75,
    unit_ns={2: 714.92, 4: 542.17},
    column_ns={2: 12.605, 4: 16.096},
    read_share=1.0216,
    norm=7.0029,
    hop_us=0.97853,
    finalize_us=3.1981,
    wire_us=3.168,
)
