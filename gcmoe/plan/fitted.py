"""Constants of the model, written by ``python -m gcmoe.plan.fit --write``."""

from gcmoe.plan.predict import Constants

RECORDS = (
    "ep2-r2-20261130T232750Z.json",
    "sustained-20261201T120130Z.json",
)  # fmt: skip
"""In ``bench/results``: what the constants were derived from."""

CONSTANTS = Constants(
    edges_us=1.6394,
    dispatch_us=5.3494,
    stage_ns=0.070373,
    sort_ns=1.5857,
    pull_ns=138.12,
    unit_ns={2: 710.25, 4: 522.14},
    column_ns={2: 11.957, 4: 16.794},
    read_share=1.0313,
    norm=7.226,
    hop_us=0.93131,
    finalize_us=3.0915,
    wire_us=3.8724,
)
