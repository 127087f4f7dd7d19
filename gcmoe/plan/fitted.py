"""Constants of the model, written by ``python -m gcmoe.plan.fit --write``."""

from gcmoe.plan.predict import Constants

RECORDS = (
    "ep2-r2-20261130T232750Z.json",
    "sustained-20261201T084148Z.json",
)  # fmt: skip
"""In ``bench/results``: what the constants were derived from."""

CONSTANTS = Constants(
    edges_us=1.6852,
    dispatch_us=5.477,
    stage_ns=0.070254,
    sort_ns=1.5848,
    pull_ns=138.23,
    unit_ns={2: 713.04, 4: 529.76},
    column_ns={2: 12.311, 4: 16.703},
    read_share=1.0292,
    norm=7.2071,
    hop_us=0.96647,
    finalize_us=3.1384,
    wire_us=3.635,
)
