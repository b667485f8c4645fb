"""Samples of a run in the terminal: one at a time with commands, or several printed in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from megarl.files.atomic import raise_storage_errors
from megarl.report.evaluations import ANSWERS, is_evaluation
from megarl.report.sample_text import make_visible
from megarl.report.samples import read_records, select_extreme
from megarl.tracking.run_record import RunRecord
from megarl.types import ConfigError

Order = Literal["file", "best", "worst"]

TRAINING = "train"
"""Name of the training samples, which belong to no validation set."""

_EVALUATION = -1
"""Step number of an evaluation's answers: they have no step."""
_MAX_MATCHES = 200
"""Maximum number of samples returned by a search over all steps."""

HELP = (
    "Enter or n: next, p: previous, > and <: next and previous step, NUMBER: that step, b: best first, w: worst first, "
    "f: as recorded, set NAME: that validation set (train: training, all: every), /TEXT: search in all steps "
    "(/ alone: none), q: end"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """The samples to show: one step or the matches of a text search, their order, and their validation set."""

    step: int | None
    order: Order = "file"
    set: str | None = None
    text: str = ""


def browse(
    path: Path, selection: Selection, console: Console, *, limit: int, ask: Callable[[str], str] | None = None
) -> None:
    """Show samples of a run folder, or answers of an evaluation folder.

    With `ask`, the user moves through them by commands: `ask` takes a prompt and returns a line, or raises EOFError.
    Without `ask`, the first `limit` are printed. Raises ConfigError for other folders, and without samples.
    """
    if is_evaluation(path):
        if selection.step is not None:
            raise ConfigError(f"--step {selection.step}: {path} is an evaluation, which has no steps; leave --step out")
        files = {_EVALUATION: path / ANSWERS}
    else:
        files = dict(RunRecord.open(path).sample_files)
    if not files:
        raise ConfigError(
            f"{path}: the run has no samples yet; they are written at the first evaluation and at the first step of "
            "loop rl"
        )
    if selection.step is not None:
        _refuse_step(path, files, selection.step)
    if ask is None:
        _print_all(files, selection, console, path, limit)
    else:
        _Browser(files, selection, console).run(ask)


def select(files: Mapping[int, Path], selection: Selection) -> list[dict[str, Any]]:
    """Return the samples of the selected or the newest step. A search covers all steps, newest first."""
    if selection.step is None and selection.text:
        steps: Sequence[int] = sorted(files, reverse=True)
    else:
        steps = [max(files) if selection.step is None else selection.step]
    matches: list[dict[str, Any]] = []
    for step in steps:
        with raise_storage_errors(files[step]):
            records = [record for record in read_records(files[step], step) if _is_selected(record, selection)]
        if selection.order != "file":
            records = select_extreme(records, len(records), sign=1 if selection.order == "worst" else -1)
        matches += records
        # A search over a long run may read gigabytes. A single step is always read completely.
        if len(matches) >= _MAX_MATCHES and len(steps) > 1:
            return matches[:_MAX_MATCHES]
    return matches


def sample_text(record: Mapping[str, Any], search: str = "") -> Text:
    """Return a sample as text: step and reward, prompt, completion or turns, right answer."""
    text = Text()
    # Not rich markup: brackets in a sample must not change the style.
    text.append(_describe_sample(record) + "\n", "bold")
    for role, content in _list_sections(record):
        text.append(f"{make_visible(role)}\n", "cyan")
        text.append(make_visible(content).rstrip("\n") + "\n")
    if search:
        text.highlight_words([search], "black on yellow", case_sensitive=False)
    return text


def _describe_sample(record: Mapping[str, Any]) -> str:
    """Return a sample's heading in one line: step, set, reward, verdict, tokens, end. Missing facts are left out."""
    is_right = record.get("answer_correct")
    reward = record.get("reward")
    step_text = "" if record["step"] == _EVALUATION else f"step {record['step']}, "
    final_answer = record.get("final_answer")
    parts = [
        f"{step_text}line {record['line']}",
        str(record.get("set", TRAINING)),
        str(record.get("source") or ""),
        "not scored" if reward is None else f"reward {reward:.4g}" if isinstance(reward, int | float) else "",
        ("right" if is_right else "wrong") if isinstance(is_right, bool) else "",
        "" if final_answer is None else f"final answer {_plain(final_answer)}",
        f"{record['tokens']} tokens" if "tokens" in record else "",
        f"ended: {record['finish_reason']}" if record.get("finish_reason") else "",
        str(record.get("reward_failure") or ""),
    ]
    return make_visible("  ".join(filter(None, parts)))


def _list_sections(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each part of a sample."""
    if record.get("rendered_prompt"):
        yield "prompt, as the policy was shown it", _plain(record["rendered_prompt"])
    else:
        yield from _split_messages(record.get("prompt"))
    turns = record.get("turns")
    if isinstance(turns, list) and turns:
        for number, turn in enumerate(turns, 1):
            turn = turn if isinstance(turn, Mapping) else {"completion": turn}
            reward = turn.get("reward")
            yield f"turn {number}" + ("" if reward is None else f", reward {reward}"), _plain(turn.get("completion"))
            yield from _split_messages(turn.get("observation"))
    else:
        yield "completion", _plain(record.get("completion"))
    if record.get("answer") not in (None, ""):
        yield "right answer", _plain(record["answer"])


def _split_messages(value: Any) -> Iterator[tuple[str, str]]:
    """Yield each message's role and text. Other fields follow the text as JSON."""
    for message in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(message, Mapping):
            other_fields = {name: item for name, item in message.items() if name not in ("role", "content") and item}
            text = _plain(message.get("content") or "")
            yield str(message.get("role", "message")), text + (f"\n{_plain(other_fields)}" if other_fields else "")
        else:
            yield "message", _plain(message)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_selected(record: Mapping[str, Any], selection: Selection) -> bool:
    if selection.set is not None and record.get("set", TRAINING) != selection.set:
        return False
    search = selection.text.lower()
    return not search or any(search in content.lower() for _, content in _list_sections(record))


def _refuse_step(path: Path, files: Mapping[int, Path], step: int) -> None:
    if step not in files:
        nearest_step = min(files, key=lambda number: abs(number - step))
        raise ConfigError(
            f"--step {step}: {path} has no samples of this step; the nearest step with samples is {nearest_step}. "
            f"There are {len(files)} such steps, from {min(files)} to {max(files)}"
        )


def _print_all(files: Mapping[int, Path], selection: Selection, console: Console, path: Path, limit: int) -> None:
    """Print the first `limit` selected samples. Raises ConfigError if there are none."""
    records = select(files, selection)
    if not records:
        criteria = [f"set {selection.set}"] if selection.set else []
        criteria += [f"text {selection.text!r}"] if selection.text else []
        raise ConfigError(
            f"{path}: no sample matches {' with '.join(criteria) or 'that step'}; `megarl samples {path}` shows all"
        )
    for record in records[:limit]:
        console.print(sample_text(record, selection.text))
    if len(records) > limit:
        console.print(f"{len(records) - limit} more samples; raise --limit to print them", style="dim")


class _Browser:
    """Viewer of one sample at a time, controlled by commands."""

    def __init__(self, files: Mapping[int, Path], selection: Selection, console: Console) -> None:
        self._files, self._console = files, console
        self._steps = sorted(files)
        self._selection = selection
        self._records = select(files, selection)
        self._position = 0

    def run(self, ask: Callable[[str], str]) -> None:
        """Show the first sample, then execute the user's commands until one quits."""
        self._console.print(HELP, style="dim")
        self._show_sample()
        while True:
            try:
                command = ask("> ").strip()
            # Ctrl-D and Ctrl-C both quit.
            except (EOFError, KeyboardInterrupt):
                return
            if command in ("q", "quit", "exit"):
                return
            self._execute(command)

    def _execute(self, command: str) -> None:
        """Execute a command of `HELP`."""
        order_of_command: dict[str, Order] = {"b": "best", "w": "worst", "f": "file"}
        if command in ("", "n", "p"):
            self._move_by(-1 if command == "p" else 1)
        elif command in order_of_command:
            self._show_selection(replace(self._selection, order=order_of_command[command]))
        elif command in ("<", ">"):
            position = self._steps.index(self._step) + (1 if command == ">" else -1)
            self._show_selection(
                replace(self._selection, step=self._steps[max(0, min(position, len(self._steps) - 1))], text="")
            )
        # Take the nearest step, because samples may be written only every few steps.
        elif command.isdecimal():
            nearest_step = min(self._steps, key=lambda step: abs(step - int(command)))
            self._show_selection(replace(self._selection, step=nearest_step, text=""))
        elif command.startswith("/"):
            self._show_selection(replace(self._selection, step=None, text=command[1:].strip()))
        elif command.startswith("set "):
            name = command.removeprefix("set ").strip()
            self._show_selection(replace(self._selection, set=None if name == "all" else name))
        else:
            self._console.print(HELP, style="dim")

    @property
    def _step(self) -> int:
        if self._selection.step is not None:
            return self._selection.step
        return int(self._records[self._position]["step"]) if self._records else self._steps[-1]

    def _move_by(self, offset: int) -> None:
        position = self._position + offset
        if not 0 <= position < len(self._records):
            self._console.print("the first" if offset < 0 else "the last", style="dim")
            return
        self._position = position
        self._show_sample()

    def _show_selection(self, selection: Selection) -> None:
        records = select(self._files, selection)
        if not records:
            self._console.print("no sample matches; the previous selection stays", style="dim")
            return
        self._selection, self._records, self._position = selection, records, 0
        self._show_sample()

    def _show_sample(self) -> None:
        if not self._records:
            self._console.print("no sample matches the selection", style="dim")
            return
        selection = self._selection
        position = f"{self._position + 1} of {len(self._records)}" + (
            "" if selection.order == "file" else f", {selection.order} first"
        )
        self._console.print(f"\n{position}", style="dim")
        self._console.print(sample_text(self._records[self._position], selection.text))
