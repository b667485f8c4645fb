"""Words of docstrings, comments, help and README: the field's terms, and none of the habits that hide them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BANNED = {
    r"counts? one token earlier": "discount factor",
    r"how far the advantage trusts": "GAE lambda",
    r"\bhow hard the reference holds\b": "strength of the KL constraint",
    r"\bwhose log-probs the ratio starts from\b": "old log-probs",
    r"\bthe ratio counts (up|down) to\b": "clip range",
    r"\btaken for swapped\b": "label smoothing",
    r"\bwhat a (good|bad) answer counts\b": "loss weight",
    r"\bratios above are held there\b": "upper bound of the ratio",
    r"\bhow token losses become one number\b": "aggregation of token losses",
    r"\bbring the advantages of all tokens\b": "whiten",
    r"\bweight of the entropy\b": "coefficient of the entropy bonus",
    r"\bso that the kl stays near\b": "target KL",
    r"\badam's denominator term\b": "Adam's epsilon",
    r"\bwhere a falling schedule ends\b": "final learning rate",
    r"\bnucleus mass\b": "nucleus sampling (top-p)",
    r"\bshare of an adapter's inputs\b": "dropout probability",
    r"\bwhat a completion's length costs\b": "length penalty",
}
"""Paraphrases of a standard term (as regular expressions, any case) and the term that says it."""


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "megarl").rglob("*.py")))


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of fields and constants included."""
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def helps(text: str) -> Iterator[tuple[int, str]]:
    """Texts of `help=`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield node.value.lineno, str(node.value.value)


@cache
def prose() -> tuple[tuple[str, str], ...]:
    """Place and text, on one line, of all that people read."""
    found = [("README.md", (ROOT / "README.md").read_text(encoding="utf-8"))]
    for path in modules():
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        for line, words in (*docstrings(text), *comments(text), *helps(text)):
            found.append((f"{name}:{line}", " ".join(words.split())))
    return tuple(found)


def test_there_is_prose_to_check() -> None:
    assert len(prose()) > 1000
    assert any("Discount factor" in text for _, text in prose())


@pytest.mark.parametrize("phrase", BANNED)
def test_a_standard_term_is_not_paraphrased(phrase: str) -> None:
    found = [place for place, text in prose() if re.search(phrase, text, re.IGNORECASE)]
    assert found == [], f"say: {BANNED[phrase]}"


def test_no_docstring_opens_with_what() -> None:
    opening = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if text.lstrip().startswith("What")
    ]
    assert opening == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        pytest.param('"""What it is."""\n', 1, id="module"),
        pytest.param('class A:\n    """A."""\n    b: int\n    """What b is."""\n', 1, id="field"),
        pytest.param('def f():\n    """What f does."""\n', 1, id="function"),
        pytest.param('def f():\n    """Do what f does."""\n    return "What"\n', 0, id="none"),
    ],
)
def test_openings_are_found(source: str, found: int) -> None:
    assert sum(text.startswith("What") for _, text in docstrings(source)) == found
