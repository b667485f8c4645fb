"""Logging of steps: metrics.jsonl, console, sample texts, and the recipe's trackers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megarl import faults
from megarl.files.atomic import append_whole, raise_disk_full_errors, sync
from megarl.platform.spans import span
from megarl.terminal import FirstOfEachKind
from megarl.tracking.display import Closing, Display
from megarl.tracking.health import BrokenRule, heldout_metrics
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.step_lines import StepLine
from megarl.tracking.trackers import RunTracker, start
from megarl.types import DiskFullError

METRICS = (
    MetricRow("time/step_seconds", "seconds", "wall time since the previous step, or since the start"),
    MetricRow(
        "time/PHASE_seconds",
        "seconds",
        "wall time of a phase of the step: start, rollout, logprobs, train, reshard, evaluation, checkpoint, export",
    ),
)


class Tracker:
    """Logs a run: writes metrics and samples to the run folder, prints a line per step, and calls the trackers.

    Adds METRICS of this module to each step: the step's time, and the time of each `phase(PHASE)`.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        steps: int | None = None,
        trackers: Sequence[str] = ("tensorboard",),
        display: Display | None = None,
    ) -> None:
        """Start the trackers, named as in `TRACKERS` or by import path. `steps` is the run's number of steps."""
        self._folder = folder
        self._display = display or Display()
        self._display.begin_steps(steps)
        self._notices = FirstOfEachKind(self.notice)
        self._last_step: int | None = None
        self._line = folder.resumed_line
        """The last logged line."""
        # Create the file now, so that an unwritable folder fails before the run starts.
        append_whole(folder.metrics_file, b"")
        self._trackers: dict[str, RunTracker] = {}
        for name in trackers:
            self._start(name)
        self._phase_seconds: dict[str, float] = {}
        self._total_seconds: dict[str, float] = {}
        self._step_started = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent in this context to the next step's metric `time/NAME_seconds`."""
        started = time.monotonic()
        try:
            with self._display.phase(name), span(name):
                yield
        finally:
            key = f"time/{name}_seconds"
            self._phase_seconds[key] = self._phase_seconds.get(key, 0.0) + time.monotonic() - started

    def begin(self, step: int) -> None:
        self._display.begin_step(step)

    @property
    def seconds(self) -> dict[str, float]:
        """Return the current step's seconds so far, in total and by phase, by metric name."""
        return {"time/step_seconds": time.monotonic() - self._step_started, **self._phase_seconds}

    def log(self, step: int, scalars: Mapping[str, float], *, evaluation_follows: bool = False) -> None:
        """Log a step's metrics. Step numbers must increase. In metrics.jsonl, NaN and infinite values become null.

        `evaluation_follows`: `log_evaluation` is called next for this step.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}, but step numbers must increase")
        timing = self._take_timing()
        self._log(StepLine(step, _floats({**scalars, **timing}), evaluation_follows))

    def log_evaluation(
        self, step: int, metrics: Mapping[str, float], whole_step_metrics: Mapping[str, float] | None = None
    ) -> None:
        """Log a step's evaluation, in a second line if the step is already logged.

        The second line has the time of step and evaluation together, the larger peak memory, and
        `whole_step_metrics`. The first line has all other metrics of the training.
        """
        timing = self._take_timing()
        step_metrics = self._line.metrics if self._line is not None and self._line.step == step else {}
        evaluation_metrics = {
            name: max(value, step_metrics.get(name, value))
            for name, value in metrics.items()
            if name not in step_metrics or name.startswith("memory/")
        }
        timing = {name: seconds + step_metrics.get(name, 0.0) for name, seconds in timing.items()}
        self._log(StepLine(step, _floats({**evaluation_metrics, **(whole_step_metrics or {}), **timing})))

    def _take_timing(self) -> dict[str, float]:
        """Return the seconds since the last logged line, in total and by phase, and reset them."""
        timing = self.seconds
        self._add_to_totals(timing)
        self._phase_seconds = {}
        # Add instead of reading the clock, so that the steps' times add up to the run's.
        self._step_started += timing["time/step_seconds"]
        return timing

    def _log(self, line: StepLine) -> None:
        faults.reach("log")
        # metrics.jsonl first, so that it is complete even if a tracker fails.
        append_whole(self._folder.metrics_file, json_line(line.as_json()))
        self._call_trackers(lambda tracker: tracker.log(line.step, line.metrics))
        self._last_step, self._line = line.step, line
        self._display.step(line.step, line.metrics, evaluation_follows=line.evaluation_follows)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records (prompt, completion, reward...) to samples/step_NNNNNN.jsonl, and pass them to the trackers.

        A record's `set` names its validation set. Training samples have no `set`.
        """
        path = self._folder.samples_folder / f"step_{step:06d}.jsonl"
        # Convert once for the file and all trackers.
        json_records = [_plain(record) for record in records]
        append_whole(path, b"".join(map(_line, json_records)))
        self._call_trackers(lambda tracker: tracker.samples(step, json_records))

    def token_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append samples written token by token to tokens/step_NNNNNN.jsonl. Trackers do not receive them."""
        path = self._folder.tokens_folder / f"step_{step:06d}.jsonl"
        append_whole(path, b"".join(map(json_line, records)))

    def flush(self) -> None:
        sync(self._folder.metrics_file)
        self._call_trackers(lambda tracker: tracker.sync())

    def close(self) -> None:
        self._call_trackers(lambda tracker: tracker.close())
        self._trackers = {}

    def attach(self, name: str, tracker: RunTracker) -> None:
        self._trackers[name] = tracker

    def _start(self, name: str) -> None:
        try:
            with raise_disk_full_errors(self._folder.path):
                self._trackers[name] = start(name, self._folder.path, self._folder.resumed_step)
        except OSError as error:
            self._report_dropped(name, error)

    def _call_trackers(self, action: Callable[[RunTracker], object]) -> None:
        """Call every tracker. Drop a failing tracker with a warning, and continue.

        Raises DiskFullError, because nothing else can be written either.
        """
        # Copy the list, because the loop removes failing trackers.
        for name, tracker in list(self._trackers.items()):
            try:
                with raise_disk_full_errors(self._folder.path):
                    action(tracker)
            except DiskFullError:
                raise
            except Exception as error:
                del self._trackers[name]
                self._report_dropped(name, error)

    def info(self, text: str) -> None:
        self._display.info(text)

    def notice(self, text: str) -> None:
        self._folder.note(text, self._last_step)
        self._display.warn(text)

    def notice_once(self, kind: str, text: str) -> None:
        self._notices.tell(kind, text)

    def unhealthy(self, finding: BrokenRule) -> None:
        """Report a broken health rule on the console, in status.json, and to trackers with an `unhealthy` method."""
        self.notice(finding.text)
        self._folder.add_finding(finding.as_json())
        self._call_trackers(lambda tracker: _write_finding(tracker, finding))

    def _report_dropped(self, name: str, error: Exception) -> None:
        self.notice(
            f"tracker {name} failed ({type(error).__name__}: {error}). The run continues without it; "
            f"{self._folder.metrics_file} has the same numbers"
        )

    def summary(self, next_commands: Sequence[str], *, has_model: bool) -> None:
        model = str(self._folder.model_folder) if has_model else None
        resumed_step = self._folder.resumed_step
        self._display.close(Closing(model, self._heldout_results(), self._total_seconds, next_commands, resumed_step))

    def _add_to_totals(self, timing: Mapping[str, float]) -> None:
        """Add a step's seconds by phase to the run's totals. Time outside of all phases is `other`."""
        phases = {phase_of(name): seconds for name, seconds in timing.items() if name != "time/step_seconds"}
        phases["other"] = timing["time/step_seconds"] - sum(phases.values())
        for name, seconds in phases.items():
            self._total_seconds[name] = self._total_seconds.get(name, 0.0) + seconds

    def _heldout_results(self) -> dict[str, tuple[float, float]]:
        """Return the first and the last value of each metric of validation sets."""
        # Read only these values into memory, because a long run has millions of others.
        rows = [
            {name: value for name, value in step.metrics.items() if name.startswith("val/")}
            for step in self._folder.logged_steps()
        ]
        values = {
            name: [value for row in rows if math.isfinite(value := row.get(name, math.nan))]
            for name in heldout_metrics(rows)
        }
        return {name: (series[0], series[-1]) for name, series in values.items() if series}


def _floats(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _write_finding(tracker: RunTracker, finding: BrokenRule) -> None:
    write = getattr(tracker, "unhealthy", None)
    if write is not None:
        write(finding.step, finding.rule, finding.text)


def phase_of(name: str) -> str:
    return name.removeprefix("time/").removesuffix("_seconds")


def json_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON. NaN and infinite numbers become null."""
    return _line(_plain(record))


def _line(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _encodable(text: str) -> str:
    """Escape lone surrogates, because UTF-8 cannot encode them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


def _plain(value: Any) -> Any:
    """Return a JSON value: arrays as lists, NaN and infinite numbers as null, texts as valid UTF-8."""
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
