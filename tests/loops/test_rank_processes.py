"""Which copies of a state are complete after a loss, and which ones leaving processes hand over."""

from __future__ import annotations

from megarl.loops.rank_processes import _is_complete, _moves


def test_copies_are_complete_only_if_each_rank_of_their_world_has_one() -> None:
    whole = [{10: (3, [0, 2])}, {10: (3, [1, 0]), 20: (3, [1])}]
    assert _is_complete(whole, 10) and not _is_complete(whole, 20) and not _is_complete(whole, 30)
    assert not _is_complete([], 10) and not _is_complete([{}, {}], 10)
    assert not _is_complete([{10: (3, [0, 2])}, {20: (3, [1, 0])}], 10)


def test_a_newer_complete_step_does_not_hide_an_older_one() -> None:
    """The driver may know only the older one: a rank was lost while the others completed the newer."""
    held = [{10: (2, [0, 1]), 20: (2, [0, 1])}, {}]
    assert _is_complete(held, 10) and _is_complete(held, 20)


def test_only_copies_that_no_staying_rank_has_are_moved() -> None:
    held = [{10: (4, [0, 3])}, {10: (4, [1, 0])}, {10: (4, [2, 1])}, {10: (4, [3, 2]), 5: (4, [2])}]
    assert _moves(held, 10, [0, 1]) == [(2, 2, 0)]
    assert _moves(held, 10, [1]) == [(2, 2, 1), (3, 0, 1)]
    assert _moves(held, 10, [0, 1, 2, 3]) == []
    # The third process is new and has nothing.
    assert _moves([*held[:2], {}, held[3]], 10, [0, 1]) == [(2, 3, 0)]
