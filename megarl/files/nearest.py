"""The known name most similar to an unknown one, for "did you mean ..."."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice with the fewest edits from a word, if they change at most a third of its letters.

    An edit inserts, removes or replaces a letter, or swaps two neighbours. Case, dashes and underscores are ignored.
    """
    normal_word = _normalise(word)
    best_match = min(
        ((_edit_distance(normal_word, _normalise(choice)), choice) for choice in choices),
        default=None,
        key=lambda pair: pair[0],
    )
    if best_match is None:
        return None
    num_edits, choice = best_match
    # At most a third of the word's letters may change.
    return choice if 3 * num_edits <= len(normal_word) else None


def _normalise(word: str) -> str:
    return word.lower().replace("-", "_")


def _edit_distance(word: str, other_word: str) -> int:
    """Return the edit distance of two words: Levenshtein with swaps (Damerau), each letter edited at most once."""
    previous_row: list[int] = []
    row_edits = list(range(len(other_word) + 1))
    for num_letters, letter in enumerate(word, 1):
        row_before_previous, previous_row, row_edits = previous_row, row_edits, [num_letters]
        for position, other_letter in enumerate(other_word, 1):
            edits_by_replacing = previous_row[position - 1] + (letter != other_letter)
            num_edits = min(edits_by_replacing, previous_row[position] + 1, row_edits[-1] + 1)
            if (
                num_letters > 1
                and position > 1
                and word[num_letters - 2 : num_letters] == other_letter + other_word[position - 2]
            ):
                num_edits = min(num_edits, row_before_previous[position - 2] + 1)
            row_edits.append(num_edits)
    return row_edits[-1]
