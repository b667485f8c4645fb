"""Tokenizers whose rules run for ever, fail, or make too many tokens are refused before a command uses them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from megarl.data.chat import load_tokenizer
from megarl.data.tokenizers import probes as tokenizer_probes
from megarl.data.tokenizers.probes import make_probe_texts, refuse_endless_encoding, refuse_endless_rules
from megarl.types import DataError

PATH = Path("folder/tokenizer.json")


def replace(pattern: str, content: str = "") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def rules(**parts: Any) -> dict[str, Any]:
    return {**json.loads(Backend(WordLevel({"?": 0}, unk_token="?")).to_str()), **parts}


FAILING = {
    "letters": {"normalizer": replace("(a|a)+$b")},
    "words": {"pre_tokenizer": split(r"(\w+\s?)+$")},
    "a word": {"pre_tokenizer": split("(ab|ab)+$c")},
    "a script": {"normalizer": replace(r"(\p{Greek}|\p{L})+#")},
    "an escape": {"normalizer": replace(r"(\x{9f8d}|\p{Han})+#")},
    "inside a sequence": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"(\s|[ \t])+x")]}},
    "a table without a trie": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    # Its trie has one unit, which leads to others.
    "a table that leads outside": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAcAABhYgA="}},
}


@pytest.mark.parametrize("name", FAILING)
def test_rules_that_fail_on_a_text_are_refused_without_output(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"^folder/tokenizer\.json: the tokenizer fails \(.* on short probe texts; "):
        refuse_endless_rules(rules(**FAILING[name]), PATH)
    assert capfd.readouterr() == ("", "")


def test_rules_that_take_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bounded repetition stays below the library's limit for each match, and takes minutes."""
    monkeypatch.setattr(tokenizer_probes, "PROBE_SECONDS", 0.1)
    with pytest.raises(DataError, match=r"takes more than 0\.1 s on short probe texts"):
        refuse_endless_rules(rules(pre_tokenizer=split("(?:a|a){1,21}$z")), PATH)


def test_added_tokens_apply_the_rules_as_the_file_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    token = {"id": 1, "content": "a" * 30 + "c", "special": False, "normalized": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    monkeypatch.setattr(tokenizer_probes, "make_probe_texts", lambda definition: [])
    refuse_endless_rules(rules(normalizer=replace("(a|a)+$b")), PATH)
    with pytest.raises(DataError, match="fails"):
        refuse_endless_rules(rules(normalizer=replace("(a|a)+$b"), added_tokens=[token | flags]), PATH)


def test_too_many_tokens_of_a_text_are_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend(WordLevel({"a": 0}, unk_token="a")))
    # One `a` becomes 100 words of their own. The check of replacements is not asked here.
    tokenizer.backend_tokenizer.normalizer = Replace(Regex("a"), "a" * 100)
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("a"), "isolated")
    with pytest.raises(DataError, match=r"makes 100 tokens of a text of 1 characters \(the limit is 64"):
        refuse_endless_encoding(tokenizer, {}, PATH, digest="")


def test_rules_that_take_too_much_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_probes, "_PROBE_BYTES", 1 << 24)
    with pytest.raises(DataError, match=r"takes more than 16 MiB of memory"):
        refuse_endless_rules(rules(normalizer=replace("a", "a" * 100_000)), PATH)


PUBLISHED = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[\u4e00-\u9fa5\u0800-\u4e00]+",
)


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_patterns_of_published_tokenizers_are_accepted(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_probes, "PROBE_SECONDS", 1.0)
    backend = Backend(WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = Sequence([Split(Regex(pattern), "isolated"), ByteLevel(False, use_regex=False)])
    definition = json.loads(backend.to_str())
    refuse_endless_rules(definition, PATH)
    refuse_endless_encoding(PreTrainedTokenizerFast(tokenizer_object=backend), definition, PATH, digest=pattern)


def test_probes_repeat_what_the_patterns_look_for() -> None:
    probes = make_probe_texts({"normalizer": {"type": "Sequence", "normalizers": [replace(r"\u00f0z{3}(foo)", "q")]}})
    assert all(unit * 30 in probes[-1] for unit in ("\u00f0", "foo", "q", "}", "3"))


def test_no_command_loads_such_a_tokenizer(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | FAILING["letters"]))
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(f"{file}: the tokenizer fails (")
