"""Logging of steps: metrics.jsonl, the console, sample texts, the recipe's trackers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megarl.files.atomic import append_whole, disk_full_named, sync
from megarl.platform.spans import span
from megarl.terminal import FirstOfEachKind
from megarl.tracking.display import Closing, Display
from megarl.tracking.health import Finding, is_accuracy
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.trackers import RunTracker, start
from megarl.types import DiskFullError

METRICS = {
    "time/step_seconds": ("seconds", "wall time since the step before, or since the start"),
    "time/PHASE_seconds": (
        "seconds",
        "wall time of the step's phase: start, rollout, logprobs, train, reshard, evaluation, checkpoint, export",
    ),
}
"""Names, units and meanings, for `tracking.table`."""


class Tracker:
    """Writes the metrics and samples of a run to its folder, and a line per step to the console.

    Adds to each step's scalars its time and that spent in `phase(PHASE)`, METRICS.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        steps: int | None = None,
        trackers: Sequence[str] = ("tensorboard",),
        display: Display | None = None,
    ) -> None:
        """`trackers` are names of `trackers.TRACKERS` or import paths, and `steps` is the run's length."""
        self._folder = folder
        self._display = display or Display()
        self._display.begin_steps(steps)
        self._notices = FirstOfEachKind(self.notice)
        self._last_step: int | None = None
        append_whole(folder.metrics_file, b"")
        self._trackers: dict[str, RunTracker] = {}
        for name in trackers:
            self._start(name)
        self._phase_seconds: dict[str, float] = {}
        self._total_seconds: dict[str, float] = {}
        self._step_started = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `time/NAME_seconds` of the next logged step."""
        started = time.monotonic()
        try:
            with self._display.phase(name), span(name):
                yield
        finally:
            key = f"time/{name}_seconds"
            self._phase_seconds[key] = self._phase_seconds.get(key, 0.0) + time.monotonic() - started

    def begin(self, step: int) -> None:
        """Show that a step begins."""
        self._display.begin_step(step)

    @property
    def seconds(self) -> dict[str, float]:
        """The times of the step so far, by the names of their metrics."""
        return {"time/step_seconds": time.monotonic() - self._step_started, **self._phase_seconds}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a step's scalars; steps increase. A value that is not finite is null in metrics.jsonl."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}; a step is logged once")
        timing = self.seconds
        row = {name: float(value) for name, value in {**scalars, **timing}.items()}
        self._add_to_totals(timing)
        self._phase_seconds = {}
        self._step_started += timing["time/step_seconds"]
        append_whole(self._folder.metrics_file, json_line({"step": step, **row}))
        self._to_trackers(lambda tracker: tracker.log(step, row))
        self._last_step = step
        self._display.step(step, row)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records (prompt, completion, reward...) to samples/step_NNNNNN.jsonl and pass them to the trackers.

        `set` of a record names its validation set; records without one are training's.
        """
        path = self._folder.samples_folder / f"step_{step:06d}.jsonl"
        plain = [_plain(record) for record in records]
        append_whole(path, b"".join(map(_line, plain)))
        self._to_trackers(lambda tracker: tracker.samples(step, plain))

    def token_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records of samples token by token to tokens/step_NNNNNN.jsonl; trackers are not told of them."""
        path = self._folder.tokens_folder / f"step_{step:06d}.jsonl"
        append_whole(path, b"".join(map(json_line, records)))

    def flush(self) -> None:
        """fsync what was logged."""
        sync(self._folder.metrics_file)
        self._to_trackers(lambda tracker: tracker.sync())

    def close(self) -> None:
        """Close the files."""
        self._to_trackers(lambda tracker: tracker.close())
        self._trackers = {}

    def _start(self, name: str) -> None:
        try:
            with disk_full_named(self._folder.path):
                self._trackers[name] = start(name, self._folder.path, self._folder.resumed_step)
        except OSError as error:
            self._give_up(name, error)

    def _to_trackers(self, tell: Callable[[RunTracker], object]) -> None:
        """Call every tracker. One that fails is dropped with a warning; the run goes on.

        Raises DiskFullError: on a full disk nothing else can be written either.
        """
        for name, tracker in list(self._trackers.items()):
            try:
                with disk_full_named(self._folder.path):
                    tell(tracker)
            except DiskFullError:
                raise
            except Exception as error:
                del self._trackers[name]
                self._give_up(name, error)

    def tell(self, text: str) -> None:
        """Print a line on the console."""
        self._display.tell(text)

    def notice(self, text: str) -> None:
        """Print a warning on the console, and note it in the run folder."""
        self._folder.note(text, self._last_step)
        self._display.warn(text)

    def notice_once(self, kind: str, text: str) -> None:
        """Print a warning, the first of its kind in this run."""
        self._notices.tell(kind, text)

    def unhealthy(self, finding: Finding) -> None:
        """Warn of a broken rule on the console, and record it in status.json and the trackers that take texts."""
        self.notice(finding.text)
        self._folder.add_finding(finding.as_json())
        self._to_trackers(lambda tracker: _write_finding(tracker, finding))

    def _give_up(self, name: str, error: Exception) -> None:
        self.notice(
            f"tracker {name} fails ({type(error).__name__}: {error}); going on without it, "
            f"{self._folder.metrics_file} has the same numbers"
        )

    def summary(self, next_commands: Sequence[str], *, has_model: bool) -> None:
        """Print what the finished run has come to and what may be run next."""
        model = str(self._folder.model_folder) if has_model else None
        accuracies = self._first_and_last_accuracies()
        resumed_step = self._folder.resumed_step
        self._display.close(Closing(model, accuracies, self._total_seconds, next_commands, resumed_step))

    def _add_to_totals(self, timing: Mapping[str, float]) -> None:
        """Add a step's time by phase; what no phase counts is `other`."""
        phases = {phase_of(name): seconds for name, seconds in timing.items() if name != "time/step_seconds"}
        phases["other"] = timing["time/step_seconds"] - sum(phases.values())
        for name, seconds in phases.items():
            self._total_seconds[name] = self._total_seconds.get(name, 0.0) + seconds

    def _first_and_last_accuracies(self) -> dict[str, tuple[float, float]]:
        """Of each validation set, also where an earlier attempt has logged the first."""
        found: dict[str, list[float]] = {}
        for row in self._folder.logged_steps():
            for name, value in row.items():
                if is_accuracy(name) and value is not None:
                    found.setdefault(name.split("/")[1], []).append(value)
        return {name: (values[0], values[-1]) for name, values in found.items()}


def _write_finding(tracker: RunTracker, finding: Finding) -> None:
    """Give a tracker the finding, if it takes any: the method is optional, so that older trackers go on."""
    write = getattr(tracker, "unhealthy", None)
    if write is not None:
        write(finding.step, finding.rule, finding.text)


def phase_of(name: str) -> str:
    """The phase of a metric `time/PHASE_seconds`."""
    return name.removeprefix("time/").removesuffix("_seconds")


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of a JSON-lines file: numbers that are not finite are null."""
    return _line(_plain(record))


def _line(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _encodable(text: str) -> str:
    """The text; half of a surrogate pair, which no file can hold, is its escape."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


def _plain(value: Any) -> Any:
    """A JSON value: arrays as lists, numbers that are not finite as null, text that UTF-8 can encode."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
