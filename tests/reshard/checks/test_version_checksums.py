"""Checksums of one version over ranks with different layouts: equal sums, and the wrong copy among several."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.reshard.boxes import Box, Piece
from megarl.reshard.checks.ledger import Ledger, RankChecksums
from megarl.reshard.checks.version_checksums import engine_differences, merge_checksums, sum_by_tensor, version_checksum

WHOLE = torch.arange(48, dtype=torch.float32).view(8, 6).to(torch.bfloat16)


def rank(who: str, first: int, last: int, dim: int = 0, flips: Sequence[int] = ()) -> RankChecksums:
    """The checksums of a rank with rows (dim 0) or columns (dim 1) `first` to `last` of the tensor, some flipped."""
    part = WHOLE.narrow(dim, first, last - first).contiguous().clone()
    for element in flips:
        part.view(torch.int16).view(-1)[element] ^= 1
    start, stop = [0, 0], list(WHOLE.shape)
    start[dim], stop[dim] = first, last
    piece = Piece(Box("w", tuple(start), tuple(stop)), "storage", 0, (part.shape[1], 1))
    return Ledger(who, (piece,), {"storage": part}).take_checksums(1)


def holders(found: Sequence[str]) -> list[str]:
    return [holder.split(" on ")[0] for holder in found]


def test_layouts_agree_on_the_version() -> None:
    layouts = [
        [rank("a", 0, 8)],
        [rank("a", 0, 3), rank("b", 3, 8)],
        [rank("a", 0, 2, dim=1), rank("b", 2, 6, dim=1), rank("c", 2, 6, dim=1)],
    ]
    found = [merge_checksums(ranks) for ranks in layouts]
    assert all(differences == [] for _, differences in found)
    assert len({version_checksum(sum_by_tensor(boxes)) for boxes, _ in found}) == 1
    flipped, _ = merge_checksums([rank("a", 0, 3), rank("b", 3, 8, flips=[4])])
    assert version_checksum(sum_by_tensor(flipped)) != version_checksum(sum_by_tensor(found[0][0]))


def test_the_majority_names_the_wrong_copy_and_two_copies_name_both() -> None:
    _, [difference] = merge_checksums([rank("a", 0, 8), rank("b", 0, 8, flips=[7]), rank("c", 0, 8)])
    assert (holders(difference.holders), difference.is_certain) == (["b"], True)
    _, [difference] = merge_checksums([rank("a", 0, 8), rank("b", 0, 8, flips=[7])])
    assert (holders(difference.holders), difference.is_certain) == (["a", "b"], False)


def test_an_engine_is_compared_with_trainers_of_another_layout() -> None:
    trainer, _ = merge_checksums([rank("t0", 0, 4), rank("t1", 4, 8)])
    assert list(engine_differences(trainer, [rank("e0", 0, 3, dim=1), rank("e1", 3, 6, dim=1)])) == []
    [difference] = engine_differences(trainer, [rank("e0", 0, 3, dim=1), rank("e1", 3, 6, dim=1, flips=[0])])
    assert (holders(difference.holders), difference.is_certain) == (["e0", "e1"], False)
    assert difference.box == Box("w", (0, 0), (8, 6))
    # The trainer has the same box, so its checksum decides between the two replicas.
    [difference] = engine_differences(trainer, [rank("e0", 0, 4, flips=[1]), rank("e1", 4, 8), rank("e2", 0, 4)])
    assert (holders(difference.holders), difference.box.stop) == (["e0"], (4, 6))


def test_a_ledger_lists_the_changed_boxes() -> None:
    storage = WHOLE.clone()
    pieces = tuple(Piece(Box("w", (row, 0), (row + 1, 6)), "s", 6 * row, (6, 1)) for row in range(8))
    ledger = Ledger("trainer rank 0", pieces, {"s": storage})
    assert ledger.find_changes() is None
    ledger.take_checksums(3)
    changes = ledger.find_changes()
    assert changes is not None and changes.boxes == ()
    storage[5, 2] += 1
    changes = ledger.find_changes()
    assert changes is not None and (changes.version, changes.boxes) == (3, (Box("w", (5, 0), (6, 6)),))
    ledger.forget()
    assert ledger.find_changes() is None
