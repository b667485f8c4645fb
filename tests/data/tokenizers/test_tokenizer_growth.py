"""Tokenizers whose replacements multiply a text are refused before they are loaded."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from transformers import PreTrainedTokenizerFast

from megarl.data.chat import encode_rendered, exceeds_token_limit
from megarl.data.tokenizers.growth import refuse_growth
from megarl.types import DataError


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*rules: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(rules)}


def template(*tokens: str, num_ids: int = 1) -> dict[str, Any]:
    pieces = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    special = {token: {"id": token, "ids": [1] * num_ids, "tokens": [token] * num_ids} for token in tokens}
    single = [*pieces, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


def table(*texts: bytes) -> dict[str, Any]:
    """Return a compiled table of SentencePiece with an empty trie of one unit and these replacements."""
    content = (4).to_bytes(4, "little") + bytes(4) + b"".join(text + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


DOUBLE = replace({"String": "a"}, "aa")
MULTIPLYING = {
    "one long replacement": {"normalizer": replace({"String": "a"}, "a" * 1_000_000)},
    "doubled again and again": {"normalizer": sequence(*[DOUBLE] * 20)},
    "nested": {"normalizer": sequence(sequence(*[DOUBLE] * 4), sequence(*[DOUBLE] * 4))},
    "between all characters": {"normalizer": replace({"Regex": ""}, "a" * 100)},
    "one long beginning": {"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}},
    "beginnings": {"normalizer": sequence(*[{"type": "Prepend", "prepend": "ab"}] * 100)},
    "template": {"post_processor": template(*["s"] * 1000)},
    "template of a long token": {"post_processor": sequence(template("s", num_ids=1000), name="processors")},
    "decoder": {"decoder": sequence(*[DOUBLE] * 20, name="decoders")},
    "bytes of bytes": {"pre_tokenizer": sequence(*[{"type": "ByteLevel"}] * 12, name="pretokenizers")},
    "table": {"normalizer": table(b"a" * 100, b"b")},
}
LIMITS = {
    "between all characters": (replace({"Regex": ""}, "a" * 63), replace({"Regex": ""}, "a" * 64)),
    "one literal": (replace({"String": "a"}, "a" * 64), replace({"String": "a"}, "a" * 65)),
    "a beginning": ({"type": "Prepend", "prepend": "a" * 63}, {"type": "Prepend", "prepend": "a" * 64}),
}
"""A rule that makes a text 64 times as long, the limit, and one that makes it longer."""
PUBLISHED = [
    {"normalizer": None, "decoder": {"type": "ByteLevel"}},
    {"normalizer": sequence({"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581"))},
    {"normalizer": sequence({"type": "NFC"}, replace({"Regex": "\\s+"}, " "), {"type": "Lowercase"})},
    {"normalizer": "NFC", "decoder": 3},
    {"normalizer": sequence(table(b"a" * 18, b"ss"), replace({"String": " "}, "\u2581"))},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": 5}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "%"}},
    {"post_processor": sequence(template("[CLS]", "[SEP]", "[SEP]"), {"type": "ByteLevel"}, name="processors")},
    {},
]


@pytest.mark.parametrize("name", MULTIPLYING)
def test_replacements_that_multiply_a_text_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"^tokenizer\.json: (normalizer|\w+ken\w+|decoder|post_\w+): .*times as long"):
        refuse_growth(MULTIPLYING[name], Path("tokenizer.json"))


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_of_growth_itself_is_accepted(name: str) -> None:
    at_limit, beyond = LIMITS[name]
    refuse_growth({"normalizer": at_limit}, Path("tokenizer.json"))
    with pytest.raises(DataError, match="65 times as long; the limit is 64"):
        refuse_growth({"normalizer": beyond}, Path("tokenizer.json"))


@pytest.mark.parametrize("tokenizer", PUBLISHED, ids=str)
def test_rules_of_published_tokenizers_are_accepted(tokenizer: dict[str, Any]) -> None:
    refuse_growth(tokenizer, Path("tokenizer.json"))


def test_a_regular_expression_that_panics_names_the_file() -> None:
    backend = Backend(WordLevel({"a": 0}, unk_token="a"))
    backend.normalizer = Replace(Regex("(a|a)+$b"), "x")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path="folder")
    with pytest.raises(DataError, match=r"^folder/tokenizer\.json: the tokenizer fails on a text \(Onig: "):
        encode_rendered(tokenizer, "a" * 30 + "c")
    with pytest.raises(DataError, match=r"^folder/tokenizer\.json"):
        exceeds_token_limit(tokenizer, ("a" * 30 + "c") * 2, 10)
