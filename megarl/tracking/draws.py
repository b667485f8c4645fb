"""Ledger of a run's prompts or training examples, `draws.jsonl`: each one drawn, and its ending.

Each line has the events of a step since the line before. `account` proves from the ledger that each epoch drew every
prompt once, over all restarts of the run.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.files.atomic import append_whole, raise_storage_errors, replace_bytes
from megarl.files.strict_json import loads
from megarl.types import DataError

LEDGER = "draws.jsonl"
"""Name of the ledger in a run folder."""

Event = tuple[str, str, int] | tuple[str, str, int, int]
"""An event in the life of a prompt.

("drawn", source, number, index): the prompt `index` of a source was drawn. `number` is its position in the source's
endless stream, so `number // size` is the epoch. ("skipped", source, count): the curriculum skipped `count` prompts
before the next draw. (ending, source, index): a prompt ended; `ending` is one of ENDINGS.
"""

_MAX_SKIPPED = 10_000_000
"""Maximum number of prompts skipped for one draw, as in `data.mixture`."""

ENDINGS = {
    "used": "trained on",
    "filtered": "dropped by algorithm.dynamic_sampling",
    "stale": "dropped for exceeding the staleness bound",
    "aborted": "dropped as surplus (rollout.stragglers = abort)",
}
"""Meanings of a drawn prompt's endings."""


@dataclass
class DrawEvents:
    """Events of the current step. Checkpoints contain them, with the number of earlier events.

    A checkpoint is written in the middle of a step, so the ledger may have more or fewer events than the checkpoint. A
    resumed run cuts the ledger to `num_written` events (`rewind`), and continues with `pending`.
    """

    num_written: int = 0
    pending: list[Event] = field(default_factory=list)

    def add(self, *event: Any) -> None:
        self.pending.append(event)

    def remove(self, kind: str, source: str, index: int) -> None:
        """Remove the newest event of a prompt, because its step will be repeated."""
        position = len(self.pending) - 1 - self.pending[::-1].index((kind, source, index))
        del self.pending[position]

    def as_json(self) -> dict[str, Any]:
        return {"num_written": self.num_written, "pending": self.pending}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DrawEvents:
        """Return the events in the result of `as_json`. Raises LookupError, TypeError or ValueError for other
        values.
        """
        return cls(int(values["num_written"]), [_parse_event(value) for value in values["pending"]])

    def write(self, file: Path, step: int, sizes: Mapping[str, int], num_open: int, too_long: int) -> None:
        """Append the pending events to the ledger, as the line of a step. Raises OSError.

        `sizes` are the numbers of prompts by source. `num_open` is the number of groups in flight or waiting.
        `too_long` is the number of records left out of the data.
        """
        line = {"step": step, "first": self.num_written, "sizes": sizes, "open": num_open, "too_long": too_long,
                "events": self.pending}  # fmt: skip
        append_whole(file, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self.num_written += len(self.pending)
        self.pending = []


def rewind(file: Path, num_events: int) -> int:
    """Cut the ledger to its first `num_events` events. Return how many of them it lacks. Raises OSError."""
    if not file.exists():
        return num_events
    num_found = 0
    lines = file.read_bytes().splitlines(keepends=True)
    retained_lines: list[bytes] = []
    for line in lines:
        ledger_line = _parse_line(line)
        if ledger_line is None or ledger_line.first + len(ledger_line.events) > num_events:
            break
        num_found += len(ledger_line.events)
        retained_lines.append(line)
    if len(retained_lines) < len(lines):
        replace_bytes(file, b"".join(retained_lines))
    return num_events - num_found


@dataclass(frozen=True, slots=True)
class _Line:
    step: int
    first: int
    sizes: Mapping[str, int]
    num_open: int
    too_long: int
    events: Sequence[Event]


@dataclass
class Epoch:
    """Prompts of one source in one epoch. `size` is the number of prompts in the data."""

    source: str
    number: int
    size: int
    draws: Counter[int] = field(default_factory=Counter)
    """Number of draws of each prompt, by its index."""
    skipped: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    """Number of drawn prompts by ending (ENDINGS). Prompts in flight or waiting have none."""
    is_complete: bool = False
    """Whether the next epoch began, or all prompts were drawn or skipped."""

    @property
    def num_open(self) -> int:
        return self.draws.total() - self.endings.total()

    @property
    def missing(self) -> int:
        """Return the number of prompts that a complete epoch neither drew nor skipped."""
        return max(self.size - len(self.draws) - self.skipped, 0) if self.is_complete else 0

    @property
    def repeated_prompts(self) -> list[int]:
        return sorted(index for index, count in self.draws.items() if count > 1)


@dataclass
class Account:
    """The content of a run's ledger. `faults` has a line per error; empty: every prompt is accounted for."""

    epochs: list[Epoch]
    num_open: int
    """The run's count of groups in flight or waiting at the last line."""
    too_long: int
    """Number of records left out as too long."""
    last_step: int
    faults: list[str]


def account(run: Path) -> Account:
    """Account for every prompt in a run's ledger.

    Raises DataError for a missing or damaged ledger, StorageError for an unreadable one.
    """
    ledger = _LedgerCheck()
    for line in _read_lines(run / LEDGER):
        ledger.add_line(line)
    return ledger.finish(run / LEDGER)


class _LedgerCheck:
    """Follows each prompt through the lines of a ledger, and collects the errors in `faults`."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._epochs: dict[tuple[str, int], Epoch] = {}
        """Epochs by (source, number of the epoch)."""
        self._num_drawn: dict[str, int] = {}
        """Number of prompts that each source's stream has drawn or skipped."""
        self._skipped: Counter[str] = Counter()
        """Number of prompts of each source that were skipped since its last draw."""
        self._in_flight: dict[tuple[str, int], deque[Epoch]] = defaultdict(deque)
        """Epochs of the draws without an ending, by source and prompt."""
        self._last_line: _Line | None = None
        self._num_events = 0

    def add_line(self, line: _Line) -> None:
        """Count the events of the next line."""
        if line.first != self._num_events:
            self.faults.append(
                f"step {line.step}: its line begins with event {line.first}; {self._num_events} events were before"
            )
        self._num_events = line.first + len(line.events)
        self._last_line = line
        for event in line.events:
            self._add_event(line, event)

    def _add_event(self, line: _Line, event: Event) -> None:
        """Count an event: skipped prompts, a draw, or the ending of a draw."""
        kind, source, number, *rest = event
        if kind == "skipped":
            self._skipped[source] += number
        elif rest:
            (index,) = rest
            self._add_draw(line, source, number, index)
        elif epochs_in_flight := self._in_flight[source, number]:
            epochs_in_flight.popleft().endings[kind] += 1
        else:
            self.faults.append(f"step {line.step}: prompt {number} of {source} was {kind} more often than drawn")

    def _add_draw(self, line: _Line, source: str, position: int, index: int) -> None:
        """Count the draw of prompt `index`. `position`: its place in the source's stream, over all epochs.

        The prompts that were skipped before it are counted too.
        """
        size = line.sizes[source]
        expected_position = self._num_drawn.get(source, 0) + self._skipped[source]
        if position != expected_position:
            self.faults.append(
                f"step {line.step}: {source} drew prompt {position} of its stream instead of {expected_position}"
            )
        # Skipped prompts count in their own epochs: a curriculum may skip beyond the end of one.
        skipped_position = position - self._skipped.pop(source, 0)
        while skipped_position < position:
            epoch_end = (skipped_position // size + 1) * size
            next_position = min(position, epoch_end)
            _find_epoch(self._epochs, source, skipped_position, size).skipped += next_position - skipped_position
            skipped_position = next_position
        epoch = _find_epoch(self._epochs, source, position, size)
        epoch.draws[index] += 1
        epoch.is_complete = (position + 1) % size == 0
        self._num_drawn[source] = position + 1
        self._in_flight[source, index].append(epoch)

    def finish(self, ledger: Path) -> Account:
        """Return the account of all added lines. Raises DataError if there were none."""
        last_line = self._last_line
        if last_line is None:
            raise DataError(f"{ledger}: the ledger is empty, because no step is complete. Wait for the first step.")
        epochs = list(self._epochs.values())
        for epoch in epochs:
            # An epoch is complete, too, if the next one has begun.
            epoch.is_complete = epoch.is_complete or (epoch.source, epoch.number + 1) in self._epochs
            epoch_text = f"epoch {epoch.number} of {epoch.source}"
            if epoch.missing:
                self.faults.append(f"{epoch_text}: {epoch.missing} prompts were never drawn")
            if epoch.repeated_prompts:
                prompts = ", ".join(map(str, epoch.repeated_prompts[:8]))
                self.faults.append(f"{epoch_text}: drawn more than once: {prompts}")
        num_open = sum(epoch.num_open for epoch in epochs)
        if num_open != last_line.num_open:
            self.faults.append(
                f"{num_open} prompts have no ending, but {last_line.num_open} groups are in flight or waiting"
            )
        return Account(epochs, last_line.num_open, last_line.too_long, last_line.step, self.faults)


def _find_epoch(epochs: dict[tuple[str, int], Epoch], source: str, number: int, size: int) -> Epoch:
    key = source, number // size
    if key not in epochs:
        epochs[key] = Epoch(source, number // size, size)
    return epochs[key]


def _read_lines(file: Path) -> Iterator[_Line]:
    """Yield the lines of a ledger, without an incomplete last line."""
    with raise_storage_errors(file):
        if not file.is_file():
            raise DataError(
                f"{file}: the run has no ledger of its prompts. It began before this version of megarl, or no step is "
                "complete."
            )
        lines = file.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        ledger_line = _parse_line(line)
        if ledger_line is not None:
            yield ledger_line
        elif number < len(lines) or line.endswith(b"\n"):
            raise DataError(f"{file}:{number}: the line is not one of a ledger. Restore the file from a copy.")


def _parse_line(line: bytes) -> _Line | None:
    """Return a line of a ledger. None: it is not valid."""
    try:
        values = loads(line, None)
        sizes = {str(name): _parse_count(size) for name, size in values["sizes"].items()}
        events = [_parse_event(value) for value in values["events"]]
        if not all(event[1] in sizes and sizes[event[1]] > 0 for event in events):
            return None
        step, first, num_open, too_long = (_parse_count(values[name]) for name in ("step", "first", "open", "too_long"))
        return _Line(step, first, sizes, num_open, too_long, events)
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def _parse_event(value: Sequence[Any]) -> Event:
    """Return the event of a ledger's line: its kind, source and numbers."""
    kind, source, *numbers = value
    is_valid = kind == "skipped" or kind == "drawn" or kind in ENDINGS
    if not is_valid or not isinstance(source, str) or len(numbers) != (2 if kind == "drawn" else 1):
        raise ValueError("not an event of a ledger")
    if kind == "skipped" and _parse_count(numbers[0]) > _MAX_SKIPPED:
        raise ValueError("more prompts skipped than one draw can skip")
    return (kind, source, *map(_parse_count, numbers))  # pyright: ignore[reportReturnType]


_MAX_COUNT = 1 << 53
"""Largest accepted integer: JSON readers of all languages read it exactly."""


def _parse_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise ValueError(f"{value!r:.40} is not a count")
    return value
