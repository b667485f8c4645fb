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

from megarl.files.atomic import append_whole, replace_bytes, storage_faults_named
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
        place = len(self.pending) - 1 - self.pending[::-1].index((kind, source, index))
        del self.pending[place]

    def as_json(self) -> dict[str, Any]:
        return {"num_written": self.num_written, "pending": self.pending}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DrawEvents:
        """Return the events in the result of `as_json`. Raises LookupError, TypeError or ValueError for other
        values.
        """
        return cls(int(values["num_written"]), [_event(value) for value in values["pending"]])

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
    """Cut the ledger to its first `num_events` events. Return the number of missing events. Raises OSError."""
    if not file.exists():
        return num_events
    num_found = 0
    lines = file.read_bytes().splitlines(keepends=True)
    retained: list[bytes] = []
    for line in lines:
        ledger_line = _parse_line(line)
        if ledger_line is None or ledger_line.first + len(ledger_line.events) > num_events:
            break
        num_found += len(ledger_line.events)
        retained.append(line)
    if len(retained) < len(lines):
        replace_bytes(file, b"".join(retained))
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
    epochs: dict[tuple[str, int], Epoch] = {}
    streams: dict[str, int] = {}
    in_flight: dict[tuple[str, int], deque[Epoch]] = defaultdict(deque)
    faults: list[str] = []
    skipped: Counter[str] = Counter()
    last: _Line | None = None
    expected = 0
    for line in _lines(run / LEDGER):
        if line.first != expected:
            faults.append(f"step {line.step}: its line begins with event {line.first}; {expected} events were before")
        expected = line.first + len(line.events)
        last = line
        for event in line.events:
            kind, source = event[0], event[1]
            if kind == "skipped":
                skipped[source] += event[2]
            elif len(event) == 4:
                number, index, size = event[2], event[3], line.sizes[source]
                first = streams.get(source, 0) + skipped[source]
                if number != first:
                    faults.append(f"step {line.step}: {source} drew prompt {number} of its stream instead of {first}")
                passed, stop = number - skipped.pop(source, 0), number
                while passed < stop:
                    end = min(stop, (passed // size + 1) * size)
                    _epoch(epochs, source, passed, size).skipped += end - passed
                    passed = end
                epoch = _epoch(epochs, source, number, size)
                epoch.draws[index] += 1
                epoch.is_complete = (number + 1) % size == 0
                streams[source] = number + 1
                in_flight[source, index].append(epoch)
            elif waiting := in_flight[source, event[2]]:
                waiting.popleft().endings[kind] += 1
            else:
                faults.append(f"step {line.step}: prompt {event[2]} of {source} was {kind} more often than drawn")
    if last is None:
        raise DataError(f"{run / LEDGER}: the ledger is empty, because no step is complete. Wait for the first step.")
    drawn_epochs = list(epochs.values())
    for epoch in drawn_epochs:
        later = epochs.get((epoch.source, epoch.number + 1))
        epoch.is_complete = epoch.is_complete or later is not None
        place = f"epoch {epoch.number} of {epoch.source}"
        if epoch.missing:
            faults.append(f"{place}: {epoch.missing} prompts were never drawn")
        if epoch.repeated_prompts:
            faults.append(f"{place}: drawn more than once: {', '.join(map(str, epoch.repeated_prompts[:8]))}")
    num_open = sum(epoch.num_open for epoch in drawn_epochs)
    if num_open != last.num_open:
        faults.append(f"{num_open} prompts have no ending, but {last.num_open} groups are in flight or waiting")
    return Account(drawn_epochs, last.num_open, last.too_long, last.step, faults)


def _epoch(epochs: dict[tuple[str, int], Epoch], source: str, number: int, size: int) -> Epoch:
    key = source, number // size
    if key not in epochs:
        epochs[key] = Epoch(source, number // size, size)
    return epochs[key]


def _lines(file: Path) -> Iterator[_Line]:
    """Yield the lines of a ledger, without an incomplete last line."""
    with storage_faults_named(file):
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
    try:
        values = loads(line, None)
        sizes = {str(name): _count(size) for name, size in values["sizes"].items()}
        events = [_event(value) for value in values["events"]]
        if not all(event[1] in sizes and sizes[event[1]] > 0 for event in events):
            return None
        counts = [_count(values[name]) for name in ("step", "first", "open", "too_long")]
        return _Line(counts[0], counts[1], sizes, counts[2], counts[3], events)
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def _event(value: Sequence[Any]) -> Event:
    kind, source, *numbers = value
    is_valid = kind == "skipped" or kind == "drawn" or kind in ENDINGS
    if not is_valid or not isinstance(source, str) or len(numbers) != (2 if kind == "drawn" else 1):
        raise ValueError("not an event of a ledger")
    if kind == "skipped" and _count(numbers[0]) > _MAX_SKIPPED:
        raise ValueError("more prompts skipped than one draw can skip")
    return (kind, source, *map(_count, numbers))  # pyright: ignore[reportReturnType]


_MOST = 1 << 53
"""Largest accepted integer: JSON readers of all languages read it exactly."""


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{value!r:.40} is not a count")
    return value
