"""The rule that packs the sequences of a batch into rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from megarl.data.packing import Costs, pack
from megarl.data.token_batch import TokenBatch


class Savings(NamedTuple):
    """Tokens of a row that are computed once for several of its sequences."""

    tokens: NDArray[Any]
    """[sequences]: for each sequence, how many of its tokens are not computed again, because an earlier sequence of the
    row begins with the same tokens.
    """
    is_refused: bool
    """Whether tokens are not shared, although sharing would save enough work."""


class RowPacking:
    """Packs sequences one after the other. Every token is computed."""

    def assign(self, batch: TokenBatch, **settings: Any) -> list[list[list[int]]]:
        """Assign a batch's sequences to rows: indices by replica and row. `settings` are those of `packing.pack`."""
        return pack(batch.lengths, **settings)

    def arrange(self, row: TokenBatch, *, sequence_multiple: int, capacity: int, costs: Costs) -> Savings | None:
        """Choose how a row is stored, and return the savings; None if this packing never saves.

        Each sequence is padded to `sequence_multiple` tokens. A row has at most `capacity` tokens. `costs` gives a
        sequence's cost for its length.
        """
        return None
