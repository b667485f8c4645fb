"""Search over a corpus: scores by hand, order of ties, unknown words, faulty files."""

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
    # The library computes in float32.
    assert index.score_documents("Red fox? fox zebra").tolist() == pytest.approx(expected, rel=1e-6)
    assert index.find_best("red fox", 3) == [0, 1, 3]


@pytest.mark.parametrize("query", ["nothing here", "", "?!"])
def test_a_query_without_a_known_word_finds_nothing(query: str) -> None:
    index = Index(TEXTS)
    assert index.score_documents(query).tolist() == [0.0] * 4
    assert index.find_best(query, 3) == []


def test_equal_scores_stay_in_the_order_of_the_corpus() -> None:
    # More ties than numpy's insertion sort (16 values) sorts in order by itself.
    texts = ["owl owl nest", *["owl tree", "sea"] * 50, "owl owl nest"]
    index = Index(texts)
    assert index.find_best("owl", 7) == [0, 101, 1, 3, 5, 7, 9]
    assert index.find_best("owl", 1) == [0]
    assert index.find_best("owl", 1000) == [0, 101, *range(1, 101, 2)]


def test_words_are_in_lower_case_and_of_all_scripts() -> None:
    index = Index(["", "Ärger_1 Straße", "ärger 1", "東京 tower"])
    assert index.find_best("STRASSE", 4) == [] and index.find_best("straße", 4) == [1]
    assert index.find_best("ÄRGER", 4) == [2] and index.find_best("ärger_1!", 4) == [1]
    assert index.find_best("(東京)", 4) == [3]


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
    [
        ("", "has no words"),
        ('{"text": "?"}', "has no words"),
        ("{\n", "line 1: not JSON"),
        ('{"text": "a"}\n{"txt": "a"}', "line 2: not a document"),
    ],
)
def test_a_faulty_corpus_is_named(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        Search(str(path))
    with pytest.raises(DataError, match="cannot be read"):
        Search(str(tmp_path / "absent.jsonl"))
