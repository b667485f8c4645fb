"""Tries a tokenizer's rules on probe texts, in a child process with limits of time and memory.

Regular expressions of a tokenizer.json may backtrack endlessly. Its other rules may fail, or multiply a text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.tokenizers.trials import find_trial_fault
from megarl.processes.process_tree import FaultyInputError
from megarl.types import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase as Tokenizer

PROBE_SECONDS = 5.0
"""CPU seconds allowed for all probe texts. Published tokenizers take about 0.1."""
_PROBE_BYTES = 1 << 30
_MAX_TOKENS_PER_CHARACTER = 64
"""Maximum number of tokens of one character. The longest known case is 33: a ligature of 18 letters, as bytes."""

_SENTENCES = (
    "The quick brown fox jumps over 13 lazy dogs; it's 7:45 o'clock, isn't it?\n\n\tdef f(x): return x**2 # 1e-10\r\n",
    "Größe, naïve façade, Ångström, œuvre; Привет, мир! 你好,世界。こんにちは、カタカナ 한국어 สวัสดี नमस्ते שלום",
    "\U0001f600\U0001f469\u200d\U0001f4bb \ufdfa \ufb03 \u212b e\u0301\u0327 \u1100\u1161\u11a8 \u00a0\u3000\u2028 "
    "\u0000\u0007\ufffd\uffff \u2260 \u222b \u00bd \u2075",
)
_CHARACTERS = (
    "aZz059 \t\n\r.,-_'\"(/#@$+=~\u0000\u0301\u00e9\u00df\u03b1\u044f\u05d0\u0628\u0905\u0e01\u3042\u30a2\u4e2d\uac00"
    "\U0001f600"
)
"""One character of each class that patterns name: letters of scripts, digits, white space, punctuation, marks."""
_RUN_LENGTH = 100
_RUN_ENDS = "\n", "\u0001"
"""Characters after a run of equal ones. An expression backtracks where the character after a run does not match."""
_MAX_UNITS = 1000
"""Maximum number of characters and words taken from a tokenizer's patterns. Probe texts repeat each. Published
tokenizers have fewer than 300.
"""
_SURROGATES = range(0xD800, 0xE000)
_ESCAPE = re.compile(r"\\(?:x\{([0-9A-Fa-f]{1,6})\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[pP]\{[^}]*\}|(.))", re.DOTALL)
_WORD = re.compile(r"\w{2,20}")


def refuse_endless_rules(definition: Mapping[str, Any], path: Path) -> None:
    """Raise DataError if the rules of a tokenizer.json fail on probe texts, or exceed the child's limits.

    The rules are tried without the vocabulary, to save time. Loading already applies them, to added tokens, so they are
    tried before.
    """
    from tokenizers import Tokenizer as Backend

    one_word_model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    rules = json.dumps({**definition, "model": one_word_model, "truncation": None, "padding": None})
    texts = make_probe_texts(definition)
    # A compiled table of replacements may fail on any single character, so all are tried.
    if '"Precompiled"' in rules:
        texts.append(" ".join(map(chr, range(_SURROGATES.start))))
    _refuse_faulty_tokenizer(path, ("rules", rules, *texts), lambda: _encode_texts(Backend.from_str(rules), texts))


def refuse_endless_encoding(tokenizer: Tokenizer, definition: Mapping[str, Any], path: Path, *, digest: str) -> None:
    """Raise DataError if a tokenizer fails on probe texts, exceeds the limits, or makes too many tokens.

    `digest` identifies the content of the tokenizer's folder.
    """
    texts = make_probe_texts(definition)
    _refuse_faulty_tokenizer(path, ("encoding", digest, *texts), partial(_check_token_counts, tokenizer, texts))


def make_probe_texts(definition: Mapping[str, Any]) -> list[str]:
    """Return the probe texts of a tokenizer.json: sentences, and its patterns' characters and words, repeated."""
    units = {**dict.fromkeys(_CHARACTERS), **dict.fromkeys(_list_pattern_units(definition))}
    runs = ((unit * (_RUN_LENGTH // len(unit)) + run_end) for unit in units for run_end in _RUN_ENDS)
    return [*_SENTENCES, *_CHARACTERS, "".join(runs)]


def _list_pattern_units(definition: Mapping[str, Any]) -> list[str]:
    """Return the different characters and words in a tokenizer's patterns, at most `_MAX_UNITS`."""
    units: dict[str, None] = {}
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        for text in _walk_patterns(definition.get(part)):
            literal = _ESCAPE.sub(_decode_escape, text)
            units |= dict.fromkeys([*_WORD.findall(literal), *literal])
    return list(units)[:_MAX_UNITS]


def _walk_patterns(rule: Any) -> Iterator[str]:
    """Yield all patterns and replacements in a nested rule, each cut to a limited length."""
    for name, value in rule.items() if isinstance(rule, Mapping) else ():
        if name in ("pattern", "content", "prepend", "String", "Regex") and isinstance(value, str):
            yield value[: 10 * _MAX_UNITS]
        elif name != "precompiled_charsmap":
            for inner_rule in value if isinstance(value, list) else [value]:
                yield from _walk_patterns(inner_rule)


def _decode_escape(escape: re.Match[str]) -> str:
    """Return the character of a regular expression's escape. Empty: the escape is a class of characters."""
    hex_digits = escape[1] or escape[2] or escape[3]
    if hex_digits:
        code = int(hex_digits, 16)
        return chr(code) if code <= sys.maxunicode and code not in _SURROGATES else ""
    return escape[4] or " "


def _encode_texts(backend: Backend, texts: Sequence[str]) -> None:
    for text in texts:
        backend.encode(text, add_special_tokens=False)


def _check_token_counts(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Raise FaultyInputError for too many tokens per character. Also decode the tokens, because decoding may hang."""
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) > _MAX_TOKENS_PER_CHARACTER * len(text):
            raise FaultyInputError(
                f"makes {len(tokens)} tokens of a text of {len(text)} characters (the limit is "
                f"{_MAX_TOKENS_PER_CHARACTER} tokens a character)"
            )
        tokenizer.decode(tokens)


def _refuse_faulty_tokenizer(path: Path, content: Sequence[str], work: Callable[[], object]) -> None:
    if fault := find_trial_fault(
        content, partial(_raise_panic_as_fault, work), seconds=PROBE_SECONDS, memory_bytes=_PROBE_BYTES
    ):
        raise DataError(
            f"{path}: the tokenizer {fault} on short probe texts; copy the tokenizer again from its source, or do not "
            "use it"
        )


def _raise_panic_as_fault(work: Callable[[], object]) -> None:
    """Call `work`. A panic of the tokenizers library (not an Exception) becomes a FaultyInputError."""
    try:
        work()
    except BaseException as error:
        if not is_panic(error):
            raise
        raise FaultyInputError(f"fails ({error})") from error


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a library written in Rust."""
    return (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")
