"""Text from data, models or ranks cannot control the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.table import Table

from megarl import cli
from megarl.cluster.ranks.rank_handle import log_tail
from megarl.terminal import Console, printable
from megarl.types import DataError

ATTACKS = {
    "colour": ("\x1b[31mred\x1b[0m", "red"),
    "title": ("\x1b]0;owned\x07title", "title"),
    "link": ("\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\", "here"),
    "clipboard without an end": ("before\x1b]52;c;after", "before52;c;after"),
    "device": ("\x1bP+q544e\x1b\\text", "text"),
    "eight bits": ("\x9b2Jscreen\x9d0;owned\x9c", "screen"),
    "carriage return": ("hidden\rshown", "hiddenshown"),
    "backspace": ("ab\b\bcd", "abcd"),
    "bare escape": ("a\x1bcb\x1b", "ab"),
    "order of letters": ("abc\u202edef", "abcdef"),
    "half a character": ("a\ud83db", "ab"),
    "plain": ("naïve 数学 🎲\n\tline", "naïve 数学 🎲\n\tline"),
}


@pytest.mark.parametrize(("text", "expected"), ATTACKS.values(), ids=ATTACKS)
def test_only_what_is_read_stays(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_a_console_keeps_its_own_colours_only() -> None:
    file = io.StringIO()
    shown = Console(file=file, force_terminal=True, color_system="standard", width=200)
    shown.print("warning: \x1b]0;owned\x07name", style="yellow", markup=False)
    table = Table("field")
    table.add_row("\x1b[2Jvalue")
    shown.print(table)
    text = file.getvalue()
    assert "\x1b[33mwarning: name" in text and "value" in text
    assert "owned" not in text and "[2J" not in text


def fail_with(message: str) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise DataError(message)

    return fail


def test_an_error_with_a_users_text_is_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", fail_with("data/\x1b]0;owned\x07x.jsonl: line 1"))
    with pytest.raises(SystemExit):
        cli.main([])
    assert capsys.readouterr().err == "error: data/x.jsonl: line 1\n"


def test_the_end_of_a_log_is_printable(tmp_path) -> None:
    (tmp_path / "log").write_bytes(b"one\n\x1b[2Jtwo\x1b]0;owned\x07\n")
    assert log_tail(tmp_path / "log").splitlines()[1:] == ["one", "two"]
