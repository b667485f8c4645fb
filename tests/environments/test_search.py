"""Search over a corpus: scores by hand, order, faulty files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megarl.environments import Turn
from megarl.environments.search import Index, Search
from megarl.types import DataError, ToolCall

TEXTS = ["the red fox", "the blue fox and the red sea", "a stone", "red red red"]


def test_scores_are_those_of_the_formula() -> None:
    mean = (3 + 7 + 2 + 3) / 4

    def part(df: int, tf: int, length: int) -> float:
        rarity = math.log(1 + (4 - df + 0.5) / (df + 0.5))
        return rarity * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * length / mean))

    expected = [
        part(3, 1, 3) + part(2, 1, 3),
        part(3, 1, 7) + part(2, 1, 7),
        0.0,
        part(3, 3, 3),
    ]
    index = Index(TEXTS)
    assert index.scores("Red fox? fox") == pytest.approx(expected)
    assert index.best("red fox", 3) == [0, 1, 3]
    assert index.best("nothing here", 3) == []


async def test_the_tool_replies_with_the_best_passages(tmp_path: Path) -> None:
    lines = [{"text": text, "title": f"No. {number}"} for number, text in enumerate(TEXTS)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))

    async def found(query: str) -> object:
        search = Search(str(path), num_results=2)
        step = await search.step(Turn(0, "", "stop", calls=(ToolCall("c", "search", {"query": query}),)))
        return step.messages[0]["content"]

    assert await found("fox") == "[1] No. 0\nthe red fox\n\n[2] No. 1\nthe blue fox and the red sea"
    assert await found("zebra") == "nothing found"


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is empty"), ("{\n", "line 1: not JSON"), ('{"text": "a"}\n{"txt": "a"}', "line 2: not a document")],
)
def test_a_faulty_corpus_is_named(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        Search(str(path))
    with pytest.raises(DataError, match="cannot be read"):
        Search(str(tmp_path / "absent.jsonl"))
