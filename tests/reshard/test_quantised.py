"""The room in which weights wait to be quantised: nobody's place is taken, and it is used again."""

from __future__ import annotations

import random

from megarl.reshard.quantised import shared_places


def test_places_are_shared_only_in_turn() -> None:
    chooser = random.Random(0)
    for _ in range(200):
        firsts = [chooser.randrange(12) for _ in range(chooser.randrange(1, 12))]
        spans = [(first, first + chooser.randrange(4), chooser.randrange(1, 50)) for first in firsts]
        places, total = shared_places(spans)
        for i, (first, last, size) in enumerate(spans):
            assert places[i] + size <= total
            for j, (other_first, other_last, other_size) in enumerate(spans[:i]):
                # A bucket is unpacked while the next is copied.
                is_apart = other_last + 1 < first or last + 1 < other_first
                assert is_apart or places[j] + other_size <= places[i] or places[i] + size <= places[j]


def test_a_place_is_used_again() -> None:
    assert shared_places([(0, 0, 7), (2, 3, 7), (5, 5, 7)]) == ([0, 0, 0], 7)
    assert shared_places([(0, 0, 7), (1, 3, 7), (5, 5, 7)]) == ([0, 7, 0], 14)
    assert shared_places([]) == ([], 0)
