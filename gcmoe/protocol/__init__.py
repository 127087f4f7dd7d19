"""The specification of a layer replay, standard library only.

Kernels trace these methods, the simulator runs them, tests state their invariants and
``docs/protocol.md`` is generated from them. Nothing here is written a second time elsewhere.
"""

from gcmoe.protocol.codecs import (
    CODECS,
    NUM_CALLS,
    BlockEntry,
    Entry,
    Field,
    RecvHeader,
    RoutesHeader,
    RowMeta,
    header_words,
    is_valid,
)
from gcmoe.protocol.edges import (
    EDGES,
    GRAPH_EDGES,
    LONE_OPERATIONS,
    Cell,
    Edge,
    GraphEdge,
    LoneOperation,
    Operation,
    Payload,
    Role,
)
from gcmoe.protocol.faults import FaultKind, FaultRecord
from gcmoe.protocol.order import Item, WorkOrder
from gcmoe.protocol.ring import Arrivals, TokenRing, W1Bitmap, is_less, is_reached, smaller
from gcmoe.protocol.words import Word, Word32, Word64
from gcmoe.protocol.workspace import (
    BASES_WORDS,
    FIRST_GENERATION,
    Region,
    WorkspaceShape,
    atom_word,
    fragment_position,
    ring_row,
    tile_width,
)

__all__ = [
    "BASES_WORDS",
    "CODECS",
    "EDGES",
    "FIRST_GENERATION",
    "GRAPH_EDGES",
    "LONE_OPERATIONS",
    "NUM_CALLS",
    "Arrivals",
    "BlockEntry",
    "Cell",
    "Edge",
    "Entry",
    "FaultKind",
    "FaultRecord",
    "Field",
    "GraphEdge",
    "Item",
    "LoneOperation",
    "Operation",
    "Payload",
    "RecvHeader",
    "Region",
    "Role",
    "RoutesHeader",
    "RowMeta",
    "TokenRing",
    "W1Bitmap",
    "Word",
    "Word32",
    "Word64",
    "WorkOrder",
    "WorkspaceShape",
    "atom_word",
    "fragment_position",
    "header_words",
    "is_less",
    "is_reached",
    "is_valid",
    "ring_row",
    "smaller",
    "tile_width",
]
