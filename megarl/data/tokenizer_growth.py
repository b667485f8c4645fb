"""Check of a tokenizer.json before it is loaded: how much longer its rules can make a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.files.model_folder import TOKENIZER, read_object
from megarl.types import DataError

_MOST_GROWTH = 64.0
"""Highest factor of a text's length. Published tokenizers have at most 4: 64 characters a character are an attack."""


def refuse_growth(folder: Path) -> None:
    """Raise DataError if the rules of a folder's tokenizer.json can multiply the length of a text."""
    path = folder / TOKENIZER[0]
    if not path.is_file():
        return
    tokenizer = read_object(path)
    for part in ("normalizer", "decoder", "post_processor"):
        if (factor := _growth(tokenizer.get(part))) > _MOST_GROWTH:
            raise DataError(
                f"{path}: {part}: its rules make a text up to {factor:.3g} times as long; the limit is "
                f"{_MOST_GROWTH:g}. Copy the tokenizer again from its source, or do not use it"
            )


def _growth(rule: Any) -> float:
    """Return the largest factor by which a rule can multiply the number of characters of a text."""
    if not isinstance(rule, Mapping):
        return 1.0
    if rule.get("type") == "Sequence":
        factor = 1.0
        for name in ("normalizers", "decoders", "processors"):
            for inner in rule.get(name) or ():
                factor *= _growth(inner)
        return factor
    # A text of one character is the worst case of what is added once.
    if rule.get("type") == "Prepend":
        return 1.0 + len(str(rule.get("prepend") or ""))
    if rule.get("type") == "TemplateProcessing":
        return max(1.0, *(_template_length(rule, name) for name in ("single", "pair")))
    pattern, content = rule.get("pattern"), rule.get("content")
    if rule.get("type") != "Replace" or not isinstance(pattern, Mapping) or not isinstance(content, str):
        return 1.0
    if isinstance(literal := pattern.get("String"), str) and literal:
        return max(1.0, len(content) / len(literal))
    # A regular expression may match nothing, between any two characters.
    return 1.0 + len(content)


def _template_length(rule: Mapping[str, Any], name: str) -> float:
    """Return the number of tokens and texts that a template of a post-processor puts together."""
    special = rule.get("special_tokens")
    length = 0.0
    for piece in rule.get(name) or ():
        added = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
        token = special.get(added.get("id")) if isinstance(added, Mapping) and isinstance(special, Mapping) else None
        length += len(token.get("ids") or ()) if isinstance(token, Mapping) else 1
    return length
