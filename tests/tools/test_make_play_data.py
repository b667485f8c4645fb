"""Conversations of a player: games by the rules, searches whose replies hold the code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.data.chat import load_tokenizer
from megarl.data.kinds.conversations import Conversations
from megarl.data.reader import read_examples
from tools.make_play_data import make_play_data


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_games_and_searches_are_played_by_their_rules(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    made = make_play_data(tmp_path / "data", games=60, sft=60, train=5, heldout=4, seed=3)
    again = make_play_data(tmp_path / "again", games=60, sft=60, train=5, heldout=4, seed=3)
    for path in made.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    games = [record["messages"] for record in lines(made / "sft.jsonl")]
    assert len(games) == 60
    for messages in games:
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
    # Some are won at once, some go on.
    assert {len(messages) for messages in games[0::3]} == {2, 4} and {len(messages) for messages in games[1::3]} > {2}

    codes = dict(re.findall(r"item (\d+) is (\d+)", (made / "corpus.jsonl").read_text()))
    problems = [*lines(made / "search_train.jsonl"), *lines(made / "search_heldout.jsonl")]
    asked = [re.findall(r"\d+", record["messages"]["content"])[0] for record in problems]
    assert [codes[item] for item in asked] == [record["gt_answer"] for record in problems]
    kinds = set()
    for record in lines(made / "search_sft.jsonl"):
        [item] = re.findall(r"\d+", record["messages"][0]["content"])
        roles = tuple(message["role"] for message in record["messages"])
        kinds.add(roles)
        if "tool" in roles:
            assert record["messages"][-2]["content"] == f"[1] The code of item {item} is {codes[item]}."
            assert record["messages"][-1]["content"] == f"\\boxed{{{codes[item]}}}"
        assert item not in asked
    reply = ("tool", "assistant")
    assert kinds == {("user", "assistant"), ("user", *reply), ("user", "assistant", *reply)}
    tokenizer = load_tokenizer(tiny_model())
    for name in ("sft", "search_sft"):
        assert (
            len(
                read_examples(
                    made / f"{name}.jsonl", Conversations(tokenizer=tokenizer, system_prompt=None, max_tokens=500)
                )
            )
            == 60
        )
