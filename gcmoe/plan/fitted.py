"""Constants of the model, written by ``python -m gcmoe.plan.fit --write``."""

from gcmoe.plan.predict import Constants

RECORDS = (
    "ep2-r2-20261130T073225Z.json",
    "peers-20261130T075246Z.json",
)  # fmt: skip
"""In ``bench/results``: what the constants were derived from."""

CONSTANTS = Constants(
    edges_us=4.8186,
    dispatch_us=7.5924,
    stage_ns=0.070891,
    sort_ns=1.5206,
    pull_ns=141.09,
    unit_ns={2: 575.88, 4: 721.73},
    column_ns={2: 15.892, 4: 12.86},
    read_share=1.0064,
    norm=9.9979,
    hop_us=2.1464,
    finalize_us=3.7729,
    wire_us=4.1861,
)
