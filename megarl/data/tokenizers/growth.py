"""Checks, before a tokenizer.json is loaded, how much its rules can lengthen a text."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.types import DataError

_MAX_GROWTH = 64.0
"""Largest accepted factor of a text's length. Published tokenizers have at most 4; 64 is an attack."""


def refuse_growth(definition: Mapping[str, Any], path: Path) -> None:
    """Raise DataError if the rules of a tokenizer.json can lengthen a text more than `_MAX_GROWTH` times."""
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        if (factor := _find_largest_factor(definition.get(part))) > _MAX_GROWTH:
            raise DataError(
                f"{path}: {part}: its rules make a text up to {factor:.3g} times as long; the limit is "
                f"{_MAX_GROWTH:g}. Copy the tokenizer again from its source, or do not use it"
            )


def _find_largest_factor(rule: Any) -> float:
    """Return the largest factor by which a rule can multiply a text's number of characters."""
    if not isinstance(rule, Mapping):
        return 1.0
    if rule.get("type") == "Sequence":
        factor = 1.0
        for name in ("normalizers", "pretokenizers", "decoders", "processors"):
            for inner_rule in _list_or_empty(rule.get(name)):
                factor *= _find_largest_factor(inner_rule)
        return factor
    # Text that is added once lengthens a text of one character most.
    if rule.get("type") == "Prepend":
        return 1.0 + len(str(rule.get("prepend") or ""))
    if rule.get("type") == "TemplateProcessing":
        return max(1.0, *(_count_template_tokens(rule, name) for name in ("single", "pair")))
    if rule.get("type") == "Precompiled":
        return _longest_replacement(rule.get("precompiled_charsmap"))
    # Each byte of a character becomes a character.
    if rule.get("type") == "ByteLevel":
        return 4.0
    pattern, content = rule.get("pattern"), rule.get("content")
    if rule.get("type") != "Replace" or not isinstance(pattern, Mapping) or not isinstance(content, str):
        return 1.0
    if isinstance(literal := pattern.get("String"), str) and literal:
        return max(1.0, len(content) / len(literal))
    # A regular expression may match the empty text between any two characters.
    return 1.0 + len(content)


def _longest_replacement(charsmap: Any) -> float:
    """Return the length of the longest replacement of a character in a compiled table of SentencePiece.

    The table is a trie's size in four bytes, the trie, and the texts, each followed by a zero byte.
    """
    try:
        table = base64.b64decode(str(charsmap), validate=True)
    except (binascii.Error, ValueError):
        return 1.0  # Loading the table reports the fault.
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1.0, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _count_template_tokens(rule: Mapping[str, Any], template_name: str) -> float:
    """Return the number of tokens in a post-processing template. The text itself counts as one."""
    special_tokens = rule.get("special_tokens")
    num_tokens = 0.0
    for piece in _list_or_empty(rule.get(template_name)):
        reference = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
        token = (
            special_tokens.get(reference.get("id"))
            if isinstance(reference, Mapping) and isinstance(special_tokens, Mapping)
            else None
        )
        num_tokens += len(_list_or_empty(token.get("ids"))) if isinstance(token, Mapping) else 1
    return num_tokens


def _list_or_empty(value: Any) -> list[Any]:
    """Return a list of a JSON file. Empty for another value: loading the file reports it."""
    return value if isinstance(value, list) else []
