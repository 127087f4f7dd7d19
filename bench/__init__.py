"""The bench: one MoE layer and its rivals, timed under the same yardstick in the same run.

``python -m bench`` runs cases and writes a record, ``python -m bench.plots`` draws records. Nothing
in ``gcmoe`` imports this package.
"""
