"""Tokenizers whose replacements multiply a text are refused before they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.data.tokenizer_growth import refuse_growth
from megarl.types import DataError


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*rules: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(rules)}


DOUBLE = replace({"String": "a"}, "aa")
MULTIPLYING = {
    "one long replacement": {"normalizer": replace({"String": "a"}, "a" * 1_000_000)},
    "doubled again and again": {"normalizer": sequence(*[DOUBLE] * 20)},
    "nested": {"normalizer": sequence(sequence(*[DOUBLE] * 4), sequence(*[DOUBLE] * 4))},
    "between all characters": {"normalizer": replace({"Regex": ""}, "a" * 100)},
    "decoder": {"decoder": sequence(*[DOUBLE] * 20, name="decoders")},
}
PUBLISHED = [
    {"normalizer": None, "decoder": {"type": "ByteLevel"}},
    {"normalizer": sequence({"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581"))},
    {"normalizer": sequence({"type": "NFC"}, replace({"Regex": "\\s+"}, " "), {"type": "Lowercase"})},
    {"normalizer": "NFC", "decoder": 3},
    {},
]


@pytest.mark.parametrize("name", MULTIPLYING)
def test_replacements_that_multiply_a_text_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(MULTIPLYING[name]))
    with pytest.raises(DataError, match=r"tokenizer\.json: (normalizer|decoder): .*times as long"):
        refuse_growth(tmp_path)


@pytest.mark.parametrize("tokenizer", PUBLISHED, ids=str)
def test_rules_of_published_tokenizers_are_accepted(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    refuse_growth(tmp_path)


def test_a_folder_without_the_file_is_accepted(tmp_path: Path) -> None:
    refuse_growth(tmp_path)
