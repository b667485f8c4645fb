"""The language of docstrings, comments and messages: numbers that show a return to riddles.

The numbers are symptoms, and a reader is the proof: `tools/read_aloud.py` prints texts for one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import read_aloud

MOST_RELATIVE_WORDS = 1.4
"""Per 100 words of docstrings. Nine codebases known for their clarity have 0.5 to 1.3; riddles had 3.8."""
LEAST_COMMENTS = 4.0
"""Comment lines per 100 code lines. The nine codebases have 2 to 20."""
MOST_VAGUE_NAMES = 3.0
"""Per 1,000 code lines. Four trainers known for their clarity have 0.07 to 1.7."""
MOST_PARTICIPLE_FUNCTIONS = 2.0
"""Percentage of functions. The four trainers have 0 to 2.7."""
OPENINGS = ("Of ", "Those ", "Who ", "What ", "As of ")
"""Words with which no sentence begins: its subject comes first."""


def test_the_package_reads_plainly() -> None:
    found = read_aloud.numbers(read_aloud.files())
    assert found.code_lines > 30_000, "the package was not read"
    assert found.relative_per_100_words <= MOST_RELATIVE_WORDS
    assert found.comments_per_100_code_lines >= LEAST_COMMENTS
    assert found.vague_names_per_1000_code_lines <= MOST_VAGUE_NAMES
    assert found.participle_function_percentage <= MOST_PARTICIPLE_FUNCTIONS
    assert (found.unclear, found.as_of, found.without_shapes) == ((), (), ())


def test_docstrings_begin_with_their_subject() -> None:
    texts = [text for path in read_aloud.files() for text in read_aloud.texts(path) if text.kind != "message"]
    assert [text.place for text in texts if text.words.startswith(OPENINGS)] == []


@pytest.mark.parametrize(
    ("source", "number", "expected"),
    [
        pytest.param('"""What that is which."""\n', "relative_per_100_words", 75.0, id="relative words"),
        pytest.param("a = 1  # Why.\nb = 2\n", "comments_per_100_code_lines", 50.0, id="comments"),
        pytest.param('"""Doc."""\n\na = (\n    1,\n)\n', "code_lines", 3, id="code lines"),
        pytest.param("a = 1  # noqa: E501\n", "comments_per_100_code_lines", 0.0, id="a comment for a tool"),
        pytest.param("raise ValueError(f'rank {1} is told so')\n", "unclear", 1, id="an unclear message"),
        pytest.param('def f() -> None:\n    """As of any model."""\n', "as_of", 1, id="as of"),
        pytest.param('def f(x: Tensor) -> int:\n    """Add."""\n', "without_shapes", 1, id="no shape"),
        pytest.param('def f(x: Tensor) -> int:\n    """Add `x` [tokens]."""\n', "without_shapes", 0, id="a shape"),
        pytest.param('def _f(x: Tensor) -> int:\n    """Add."""\n', "without_shapes", 0, id="a private function"),
        pytest.param("found = 1\nsizes = 2\n", "vague_names_per_1000_code_lines", 500.0, id="a vague name"),
        pytest.param("for a, other in f(): pass\n", "vague_names", 1, id="a vague name of a loop"),
        pytest.param("def f(self, *, own): self._kept = own\n", "vague_names", 2, id="a parameter, an attribute"),
        pytest.param("hidden = padded\nprint(own)\n", "vague_names", 0, id="no vague name is bound"),
        pytest.param("def _settled(): pass\ndef read(): pass\n", "participle_function_percentage", 50.0, id="verbs"),
        pytest.param("def feed(): pass\ndef found_in(): pass\n", "participle_functions", 0, id="no participle"),
        pytest.param('"""One two."""\na = 1\n', "docstring_words_per_100_code_lines", 200.0, id="docstrings"),
    ],
)
def test_a_number_counts_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, number: str, expected: float
) -> None:
    monkeypatch.setattr(read_aloud, "PACKAGE", tmp_path / "megarl")
    path = tmp_path / "megarl" / "module.py"
    path.parent.mkdir()
    path.write_text(source)
    found = getattr(read_aloud.numbers([path]), number)
    assert (len(found) if isinstance(found, tuple) else found) == expected


def test_texts_are_drawn_for_a_reader(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["read_aloud.py", "--count", "2", "--seed", "3", "--bare"])
    read_aloud.main()
    printed = capsys.readouterr().out
    assert [printed.count(f"[{kind}]") for kind in ("docstring", "field", "message")] == [2, 2, 2]
    assert not re.search(r"\.py:\d", printed)
