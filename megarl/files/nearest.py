"""The known name most similar to an unknown one, for "did you mean ..."."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice with the fewest edits from a word, if they change at most a third of its letters.

    An edit inserts, removes or replaces a letter, or swaps two neighbours. Case, dashes and underscores are ignored.
    """
    plain = _plain(word)
    best = min(((_edits(plain, _plain(choice)), choice) for choice in choices), default=None, key=lambda pair: pair[0])
    return best[1] if best and 3 * best[0] <= len(plain) else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


def _edits(first: str, second: str) -> int:
    """Return the edit distance of two words: Levenshtein with swaps (Damerau), each letter edited at most once."""
    before: list[int] = []
    current = list(range(len(second) + 1))
    for row, letter in enumerate(first, 1):
        earlier, before, current = before, current, [row]
        for column, target in enumerate(second, 1):
            replaced = before[column - 1] + (letter != target)
            fewest = min(replaced, before[column] + 1, current[-1] + 1)
            if row > 1 and column > 1 and first[row - 2 : row] == target + second[column - 2]:
                fewest = min(fewest, earlier[column - 2] + 1)
            current.append(fewest)
    return current[-1]
