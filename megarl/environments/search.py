"""Environment with a search over a local corpus as a tool, ranked by BM25 (Robertson and Zaragoza 2009, eq. 3.15)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.environments.tools import ToolEnvironment, tool
from megarl.files.regular import check_regular
from megarl.files.strict_json import parse
from megarl.types import DataError

SATURATION = 1.2
"""Parameter k1 of BM25. With a smaller value, repeated occurrences of a term in a document add less."""
LENGTH_NORMALIZATION = 0.75
"""Parameter b of BM25. 0 ignores the documents' lengths, 1 counts occurrences in proportion to length."""


class Search(ToolEnvironment):
    """Environment with the problem's messages and the tool `search`.

    `corpus` is a JSONL file of documents with a field "text" and optionally "title".
    """

    def __init__(self, corpus: str, *, num_results: int = 3, **settings: Any) -> None:
        super().__init__(**settings)
        if num_results < 1:
            raise ValueError(f"num_results = {num_results}: must be at least 1")
        self.num_results = num_results
        self.index = _index_of_file(str(Path(corpus).resolve()))

    @tool
    async def search(self, query: str) -> str:
        """Find the passages of the corpus fitting a query best.

        query: a few words
        """
        found = self.index.best(query, self.num_results)
        if not found:
            return "nothing found"
        return "\n\n".join(f"[{place}] {self.index.texts[number]}" for place, number in enumerate(found, start=1))


class Index:
    """Search index of a corpus: for each term, the documents containing it."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        counts = [Counter(terms(text)) for text in texts]
        lengths = np.array([count.total() for count in counts], np.float64)
        self._norm = SATURATION * (
            1 - LENGTH_NORMALIZATION + LENGTH_NORMALIZATION * lengths / max(1.0, float(lengths.mean()))
        )
        postings: dict[str, tuple[list[int], list[int]]] = {}
        for number, count in enumerate(counts):
            for term, occurrences in count.items():
                numbers, frequencies = postings.setdefault(term, ([], []))
                numbers.append(number)
                frequencies.append(occurrences)
        self._postings = {
            term: (np.array(numbers, np.int64), np.array(frequencies, np.float64))
            for term, (numbers, frequencies) in postings.items()
        }

    def scores(self, query: str) -> NDArray[np.float64]:
        """Return the BM25 score of each document for a query, [documents]; 0 if it contains no term of the query."""
        scores = np.zeros(len(self.texts))
        for term in dict.fromkeys(terms(query)):
            if term not in self._postings:
                continue
            numbers, frequencies = self._postings[term]
            # The inverse document frequency with + 1 in the logarithm, so that it is never negative.
            rarity = np.log(1 + (len(self.texts) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            scores[numbers] += rarity * frequencies * (SATURATION + 1) / (frequencies + self._norm[numbers])
        return scores

    def best(self, query: str, count: int) -> list[int]:
        """Return the numbers of the `count` documents with the highest scores, best first. Ties are in the corpus's
        order.
        """
        scores = self.scores(query)
        # A stable sort keeps ties in order, so results do not depend on the machine.
        order = np.argsort(-scores, kind="stable")[:count]
        return [int(number) for number in order if scores[number] > 0]


def terms(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


@lru_cache(maxsize=8)
def _index_of_file(path: str) -> Index:
    """Return the search index of a JSONL file. A process builds it once."""
    try:
        lines = check_regular(Path(path)).read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: the corpus cannot be read ({error.strerror}); correct its path") from error
    texts = [_text(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not texts:
        raise DataError(f'{path}: the corpus is empty; write one document {{"text": ...}} per line')
    return Index(texts)


def _text(path: str, number: int, line: bytes) -> str:
    try:
        fields = parse(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(fields, Mapping) or not isinstance(fields.get("text"), str):
        raise DataError(f'{path}, line {number}: not a document; give {{"text": ...}}, perhaps with a "title"')
    title = fields.get("title")
    return f"{title}\n{fields['text']}" if isinstance(title, str) and title else fields["text"]
