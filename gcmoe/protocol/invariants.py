"""What holds in every reachable state of the protocol, and why.

The simulator checks the statements while it runs, tests name them, ``docs/protocol.md`` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invariant:
    """``text`` holds in every state without a fault, because of ``holds_because``."""

    name: str
    text: str
    holds_because: str


INVARIANTS: tuple[Invariant, ...] = (
    Invariant(
        "one_generation",
        "All roles of a replay on a rank work with one generation, read from device memory.",
        "only the last CTA of finalize changes it, after compute_done of every CTA of compute; "
        "its scheduler has read the bases and seen the routes, which follow the header words of "
        "every CTA of dispatch, which follow its read of the bases; the next replay starts behind "
        "this",
    ),
    Invariant(
        "one_ahead",
        "No rank is more than one generation ahead of another while it sends headers.",
        "dispatch(g + 1) ends only after the words of generation g + 1 of every rank, also with no "
        "tokens here and none routed here; a rank sends those only after its replay g has ended",
    ),
    Invariant(
        "header_total",
        "The R * Q header words that a rank awaits cover every staged row and entry of every "
        "source, its own included, for any dispatch grid D <= Q.",
        "CTA c of a source writes the words c, c + D, ... at every rank behind one release of its "
        "own share, also with count zero; a reader compares the generation of each word",
    ),
    Invariant(
        "header_parity",
        "A header word or an entry is not overwritten while a CTA may still read it.",
        "there is one copy per parity of the generation, ranks are at most one replay apart, and "
        "dispatch(g + 1) starts only after every CTA of dispatch(g) has ended",
    ),
    Invariant(
        "one_call",
        "The rows that a rank combines in one replay come from one layer call of all ranks.",
        "a header holds the bind index of its layer; equal generation with another call is the "
        "fault CALL_MISMATCH, raised before a row is pulled",
    ),
    Invariant(
        "bounded_input",
        "No count, token, slot or expert from a peer leads to an access outside the workspace.",
        "counts are compared with the entry capacity (fault BAD_COUNT), indices have the widths of "
        "the codecs and are compared with their bounds before use",
    ),
    Invariant(
        "full_before_read",
        "A slot's full counter reaches (epoch + 1) * U when, and only when, all rows of its block "
        "lie in it.",
        "row r < n - 1 of a block of n rows adds 1 and row n - 1 adds U - n + 1, each with release "
        "after its own data; only the sum over all n rows reaches U, and a block has 1 to U rows",
    ),
    Invariant(
        "empty_before_store",
        "No row is stored into a slot while a block of an earlier epoch may still be read there.",
        "dispatch awaits epoch * (H/64) in the slot's empty counter before the first store, and "
        "each W2 item adds its columns after its last read of rows, scales, a and metadata; what "
        "lay in other slots of an earlier replay, whose blocks had another size, has been read "
        "when that replay's compute ends",
    ),
    Invariant(
        "bitmap_parity",
        "A W2 item reads only columns of a that W1 stored in the same epoch.",
        "each bit is flipped once per epoch, so a bit of an even epoch is complete at one and of "
        "an odd epoch at zero; the value that the epoch before left fails the comparison. That of "
        "two epochs before would pass: when a slot recurs in a replay, the item first waits for "
        "its block to be full, which the slot is only after the epoch before has ended",
    ),
    Invariant(
        "each_item_once",
        "Every (W1 or W2, block, tile) is done exactly once, as a whole.",
        "the order is a bijection from tickets to items and a ticket is drawn by one atomic add; "
        "items are never cut along K, so results do not depend on the batch or the grid",
    ),
    Invariant(
        "backward_waits",
        "An item waits only for items with a lower ticket, so one CTA alone makes progress.",
        "W1 of a block precedes its W2, and blocks alive at a time never outnumber the S slots",
    ),
    Invariant(
        "arrivals_complete",
        "finalize sums columns of a token only when all its valid slots hold those of this replay.",
        "the arrivals of each group of G columns are awaited to base + valid * (G/64), a source "
        "adds rows * columns/64 to the group of its tile behind a system-wide fence, and ids "
        "outside [0, E) are masked in binning, target and sum alike",
    ),
    Invariant(
        "single_copies",
        "Staged rows and combine slots need no second copy.",
        "a peer writes combine slots of replay g + 1 only after this rank's headers g + 1, which "
        "follow finalize(g); staged rows are overwritten in g + 1 only after finalize(g) has seen "
        "the arrivals that every pull of g precedes",
    ),
    Invariant(
        "cumulative",
        "No cell but the ticket, the done counters and the claims is reset, and wrapping at 2^32 "
        "is harmless.",
        "counters have one increment per use whatever the batch, targets are computed modulo 2^32 "
        "from the same bases, and two sides of a comparison are less than 2^31 apart",
    ),
    Invariant(
        "same_targets",
        "Capacities, tiles and grids may differ between ranks and replays.",
        "no target contains them: counts are in 64-column units and in rows of U, and S, U, Q, H, "
        "I and the entry capacity are constants of the workspace",
    ),
    Invariant(
        "never_wrong",
        "After a fault an element of y is right or NaN.",
        "a CTA whose wait was aborted publishes nothing more and writes NaN into its share of y; a "
        "CTA that sees the abort flag on entry stages, sends and advances nothing. Overlapping "
        "replays are the exception: the second restages rows under the first before it knows, so y "
        "of both is invalid on all ranks",
    ),
)
