from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.report.browse import Selection, browse
from megarl.terminal import Terminal
from megarl.types import ConfigError
from tests.report.made_runs import attempt_of, lines, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run", steps=2)
    records = [
        {"prompt": [{"role": "user", "content": f"q{number}"}], "completion": f"c{number}", "reward": number % 3}
        for number in range(6)
    ]
    lines(folder / "samples/step_000002.jsonl", [*records, {"set": "heldout", "completion": "\x1b[2Jheld"}])
    lines(folder / "samples/step_000001.jsonl", [{"completion": "older"}, attempt_of(1)])
    return folder


def shown(run: Path, *commands: str, limit: int = 10, **selection: object) -> str:
    """The output of the last command, or without any the plain listing."""
    console = Terminal(file=io.StringIO(), width=200, highlight=False)
    left = list(commands)
    before = 0

    def ask(_: str) -> str:
        nonlocal before
        if not left:
            raise EOFError
        before = len(console.file.getvalue())  # type: ignore[attr-defined]
        return left.pop(0)

    chosen = Selection(**{"step": None, **selection})  # type: ignore[arg-type]
    browse(run, chosen, console, limit=limit, ask=ask if commands else None)
    return console.file.getvalue()[before:]  # type: ignore[attr-defined]


def test_samples_are_printed_in_order(run: Path) -> None:
    text = shown(run)
    assert [f"c{number}" in text for number in range(6)] == [True] * 6
    assert "step 2, line 1  train  reward 0" in text and "\u241b[2Jheld" in text and "\x1b" not in text
    best = shown(run, order="best", limit=2)
    assert best.index("c2") < best.index("c5") and "c1" not in best and "4 more samples; raise --limit" in best
    assert "c0" in shown(run, order="worst", limit=1)
    assert "c0" not in shown(run, set="heldout") and "not scored" in shown(run, set="heldout")
    assert "older" in shown(run, text="OLDER") and "c0" not in shown(run, text="older")
    turns = shown(run, step=1)
    assert turns.index("turn 1, reward 0.0") < turns.index("The tea costs 6 euros.") < turns.index("turn 2, reward 1.0")


@pytest.mark.parametrize(
    ("commands", "last"),
    [
        pytest.param(["", "n", "p"], "c1", id="next and previous"),
        pytest.param(["p"], "the first", id="before the first"),
        pytest.param(["b", "n"], "c5", id="best"),
        pytest.param(["w"], "c0", id="worst"),
        pytest.param(["set heldout"], "held", id="set"),
        pytest.param(["set no"], "the previous selection stays", id="no set"),
        pytest.param(["<"], "older", id="step before"),
        pytest.param(["<", "<", "<", ">"], "older", id="first step"),
        pytest.param(["1"], "older", id="step"),
        pytest.param(["/q4"], "c4", id="search"),
        pytest.param(["/OLDER", "/"], "c0", id="no search"),
        pytest.param(["what"], "Enter or n: next", id="help"),
    ],
)
def test_commands(run: Path, commands: list[str], last: str) -> None:
    assert last in shown(run, *commands)
    assert shown(run, *commands, "q", "n") == ""


def test_what_is_not_there_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the nearest step with samples is 2. There are 3 such steps, from 0 to 2"):
        shown(run, step=9)
    with pytest.raises(ConfigError, match="no sample matches set x with text 'y'"):
        shown(run, set="x", text="y")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/status.json").write_text(json.dumps({"state": "starting"}))
    with pytest.raises(ConfigError, match="has no samples yet"):
        shown(tmp_path / "new")
    with pytest.raises(ConfigError, match="is not a run folder"):
        shown(tmp_path)


def test_the_command_prints_where_there_is_no_terminal(run: Path) -> None:
    command = [sys.executable, "-m", "megarl", "samples", str(run), "--sort", "best", "--limit", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stdout.startswith("step 2, line 3  train  reward 2\n"), done.stderr
