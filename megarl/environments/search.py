"""Environment with a search over a local corpus as a tool, ranked by BM25 (Robertson and Zaragoza 2009, eq. 3.15)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from bm25s import BM25
from numpy.typing import NDArray

from megarl.environments.tools import ToolEnvironment, tool
from megarl.files.regular import check_regular
from megarl.files.strict_json import MEDIUM, parse
from megarl.types import DataError

SATURATION = 1.2
"""Parameter k1 of BM25. The smaller it is, the less repeated occurrences of a term in a document count."""
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
        self.index = _build_index(str(Path(corpus).resolve()))

    @tool
    async def search(self, query: str) -> str:
        """Find the passages of the corpus fitting a query best.

        query: a few words
        """
        document_numbers = self.index.find_best(query, self.num_results)
        if not document_numbers:
            return "nothing found"
        return "\n\n".join(
            f"[{rank}] {self.index.texts[document_number]}"
            for rank, document_number in enumerate(document_numbers, start=1)
        )


class Index:
    def __init__(self, texts: Sequence[str]) -> None:
        """Index the words of `texts` for BM25, with the source's formulas."""
        self.texts = tuple(texts)
        vocabulary: dict[str, int] = {}
        documents = [[vocabulary.setdefault(term, len(vocabulary)) for term in terms(text)] for text in texts]
        # Lucene's inverse document frequency has + 1 in the logarithm, so it is never negative. Atire's term frequency
        # has the factor k1 + 1 of the source.
        self._bm25 = BM25(SATURATION, LENGTH_NORMALIZATION, method="atire", idf_method="lucene", backend="numpy")
        # bm25s 0.3 can add an empty word for queries without words. `score_documents` answers these itself.
        self._bm25.index((documents, vocabulary), create_empty_token=False, show_progress=False)

    def score_documents(self, query: str) -> NDArray[np.float32]:
        """Return each document's BM25 score [documents]; 0 without a term of the query."""
        words = list(dict.fromkeys(terms(query)))
        # bm25s 0.3 raises IndexError for an empty list; it skips unknown words.
        return self._bm25.get_scores(words) if words else np.zeros(len(self.texts), np.float32)

    def find_best(self, query: str, count: int) -> list[int]:
        """Return the numbers of the `count` documents with the highest scores, best first. Ties keep the corpus's
        order.
        """
        scores = self.score_documents(query)
        matches = np.flatnonzero(scores)
        if len(matches) > count:
            # bm25s.retrieve returns ties in any order. Keep all documents tied with the last one, then sort them.
            lowest_score = np.partition(scores[matches], -count)[-count]
            matches = np.flatnonzero(scores >= lowest_score)
        order = np.argsort(-scores[matches], kind="stable")[:count]
        return matches[order].tolist()


def terms(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@lru_cache(maxsize=8)
def _build_index(path: str) -> Index:
    """Index a corpus of JSON lines with `text`. Raises DataError."""
    try:
        lines = check_regular(Path(path)).read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: the corpus cannot be read ({error.strerror}); correct its path") from error
    texts = [_read_document(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not any(map(terms, texts)):
        raise DataError(f'{path}: the corpus has no words; write one document {{"text": ...}} per line')
    return Index(texts)


def _read_document(path: str, line_number: int, line: bytes) -> str:
    """Return the text of a document, with its title in front. Raises DataError for an invalid line."""
    try:
        fields = parse(line, MEDIUM)
    except ValueError as error:
        raise DataError(f"{path}, line {line_number}: not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(fields, Mapping) or not isinstance(fields.get("text"), str):
        raise DataError(f'{path}, line {line_number}: not a document; give {{"text": ...}}, perhaps with a "title"')
    title = fields.get("title")
    return f"{title}\n{fields['text']}" if isinstance(title, str) and title else fields["text"]
