"""Files of a running run, read again and again. Each read covers only the bytes added since the last one.

The folder may be on a shared file system, with the run on another machine. So kernel notifications are not used. A file
may be half written, replaced, or missing for a moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.files.folder_lock import Heartbeats
from megarl.files.record_files import parsed_value
from megarl.files.strict_json import MEDIUM, SMALL
from megarl.report.curves import phase_times
from megarl.tracking.run_record import attempt_folders, refuse_other_folders, run_state, step_files, whole_number
from megarl.tracking.step_lines import StepLine

ACTIVE = ("starting", "running")
"""States in status.json before a run's end."""
_MOST_ROWS = 400
"""Number of newest steps in memory. A dashboard shows fewer, and a run may have a million."""
_PACE_STEPS = 20
"""Number of newest steps that predict the end."""
_MOST_BYTES = 1 << 24
"""Maximum number of newest bytes read at once (16 MiB): about 700 steps with 500 metrics each."""
_SAMPLE_BYTES = 1 << 18
"""Number of last bytes read from a file of samples. A large step's file may have gigabytes."""


@dataclass(slots=True)
class GrowingFile:
    """Reader of a file that another process appends to. If more than 16 MiB were added, older lines are skipped for
    good.
    """

    path: Path
    _offset: int = 0
    _inode: int = 0

    def read(self) -> tuple[list[bytes], bool]:
        """Return the new complete lines, and whether the file was replaced. A replaced file is read from its start.

        An incomplete line waits for a later read. A missing file has no lines. Raises OSError.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                # A resumed run replaces the file, without the steps after its checkpoint.
                is_replaced = status.st_ino != self._inode or status.st_size < self._offset
                if is_replaced:
                    self._inode, self._offset = status.st_ino, 0
                start = max(self._offset, status.st_size - _MOST_BYTES)
                file.seek(start)
                text = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return [], False
        # NFS may show a file's new size before its new bytes. Until then, they are read as zeros.
        text = text.partition(b"\0")[0]
        complete_lines, line_end, _ = text.rpartition(b"\n")
        if not line_end:
            return [], is_replaced
        lines = complete_lines.split(b"\n")
        if start > self._offset:
            # Reading started within the first line.
            del lines[0]
        self._offset = start + len(complete_lines) + len(line_end)
        return lines, is_replaced


@dataclass(slots=True)
class WatchedRun:
    """Contents of a run folder at the last `refresh`."""

    path: Path
    status: Mapping[str, Any] = field(default_factory=dict)
    attempt: Mapping[str, Any] = field(default_factory=dict)
    """Content of attempt.json: facts about the newest start."""
    attempt_number: int = 0
    rows: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of the newest steps, by step in order."""
    notices: list[str] = field(default_factory=list)
    """Warnings of the newest start."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Last samples of the newest step with samples, each with its `step`."""
    trouble: str = ""
    """Why the last refresh could not read a file. Empty: it could."""
    silence: str = ""
    """Message about a suspended or silent driver. Empty: it is alive, or the run has ended."""
    _heartbeats: Heartbeats | None = None
    _metrics: GrowingFile | None = None
    _notice_file: GrowingFile | None = None
    _last_line: StepLine | None = None
    _samples_step: int = -1
    _last_step_time: float = 0.0
    _saw_last_step: bool = False
    """Whether the last step was logged while this process watched. Else `_last_step_time` is the file's time."""

    def __post_init__(self) -> None:
        refuse_other_folders(self.path)
        self._heartbeats = Heartbeats(self.path)
        self._metrics = GrowingFile(self.path / "metrics.jsonl")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def state(self) -> str:
        return run_state(self.path, self.status)

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended. Without a readable status.json it counts as starting."""
        return self.state not in (*ACTIVE, "unknown")

    @property
    def exit_code(self) -> int | None:
        code = self.status.get("exit_code")
        return code if isinstance(code, int) else None

    @property
    def step(self) -> int:
        return max(whole_number(self.status.get("step")), max(self.rows, default=0))

    @property
    def steps(self) -> int | None:
        planned = self.attempt.get("steps")
        return planned if isinstance(planned, int) and planned > 0 else None

    @property
    def seconds_since_step(self) -> float | None:
        """Return the seconds since the last logged step, or None. Another machine's clock may be wrong."""
        return max(0.0, time.time() - self._last_step_time) if self.rows else None

    @property
    def seconds_left(self) -> float | None:
        """Return the predicted seconds until the last step. None: the run has ended, or timed no step yet."""
        if self.is_over or not self.steps:
            return None
        # A start's first step includes the start and one-time compilation.
        timed_rows = [row for row in self._newest(_PACE_STEPS) if "time/start_seconds" not in row]
        seconds = [row["time/step_seconds"] for row in timed_rows if row.get("time/step_seconds", 0.0) > 0]
        if not seconds:
            return None
        # The file's time may be another machine's, and wrong.
        seconds_waited = self.seconds_since_step if self._saw_last_step else 0.0
        return max(0.0, fmean(seconds) * (self.steps - self.step) - (seconds_waited or 0.0))

    def values(self, metric: str, max_values: int) -> list[float]:
        values = [row[metric] for row in self.rows.values() if metric in row]
        return values[-max_values:]

    def phase_seconds(self) -> dict[str, float]:
        """Return the newest steps' mean seconds by phase, longest first. `other` is time outside phases."""
        rows = [(step, row) for step, row in self.rows.items() if "time/step_seconds" in row][-_PACE_STEPS:]
        total = phase_times(rows)["total"] if rows else {}
        return {phase: seconds / len(rows) for phase, seconds in total.items()}

    def refresh(self) -> list[int]:
        """Read new contents. Return the numbers of steps logged or evaluated since the last call.

        If a file is unreadable, its last contents remain, and `trouble` names it: a shared file system may be away for
        a moment.
        """
        self.trouble = ""
        steps: list[int] = []
        try:
            self._read_status()
            self._read_newest_start()
            steps = self._read_metrics()
            self._read_samples()
        except OSError as error:
            self.trouble = f"{error.filename or self.path}: cannot be read ({error.strerror}); trying again"
        self._read_heartbeats()
        return steps

    def _newest(self, count: int) -> list[Mapping[str, float]]:
        return list(self.rows.values())[-count:]

    def _read_heartbeats(self) -> None:
        assert self._heartbeats is not None
        if self.is_over or self.trouble:
            self.silence = ""
            # While no file can be read, the driver does not count as silent.
            self._heartbeats.forget()
            return
        # These are extra information, so show the run without them.
        with suppress(OSError):
            self.silence = self._heartbeats.describe_silence()

    def _read_status(self) -> None:
        try:
            status = parsed_value((self.path / "status.json").read_bytes())
        except FileNotFoundError:
            return
        # On a full disk the file is overwritten in place, so a read may see half of it.
        if isinstance(status, dict):
            self.status = status

    def _read_newest_start(self) -> None:
        """Read the newest start's facts and its new notices."""
        folders = attempt_folders(self.path / "logs")
        if not folders:
            return
        number, folder = folders[-1]
        if number != self.attempt_number or self._notice_file is None:
            self.attempt_number, self.attempt, self.notices = number, {}, []
            self._notice_file = GrowingFile(folder / "notices.jsonl")
        try:
            facts = parsed_value((folder / "attempt.json").read_bytes())
        except FileNotFoundError:
            facts = None
        if isinstance(facts, dict):
            self.attempt = facts
        lines, is_replaced = self._notice_file.read()
        if is_replaced:
            self.notices = []
        texts = (value.get("text") for line in lines if isinstance(value := parsed_value(line), dict))
        self.notices += [text for text in texts if isinstance(text, str)]

    def _read_metrics(self) -> list[int]:
        """Read the new lines of metrics.jsonl. Return the numbers of their steps."""
        assert self._metrics is not None
        had_rows = bool(self.rows)
        lines, is_replaced = self._metrics.read()
        if is_replaced:
            self.rows, self._last_line = {}, None
        new_steps: dict[int, None] = {}
        # An evaluated step has two lines.
        for line in filter(None, (StepLine.read(content, SMALL) for content in lines[-2 * _MOST_ROWS :])):
            if self._last_line is not None and self._last_line.is_continued_by(line):
                line = self._last_line.with_evaluation(line)
            self._last_line = line
            self.rows.pop(line.step, None)
            self.rows[line.step] = line.metrics
            new_steps[line.step] = None
        for step in list(self.rows)[:-_MOST_ROWS]:
            del self.rows[step]
        if new_steps:
            # Steps of the first read were written before: their time is the file's.
            self._saw_last_step = had_rows
            self._last_step_time = time.time() if had_rows else (self.path / "metrics.jsonl").stat().st_mtime
        return list(new_steps)

    def _read_samples(self) -> None:
        # Listing many files is slow on a shared file system, so do it once per step.
        if self._samples_step == self.step and self.samples:
            return
        files = step_files(self.path / "samples")
        if not files:
            return
        step, path = files[-1]
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _SAMPLE_BYTES))
            lines = file.read().split(b"\n")
        # The first and last lines may be incomplete. They are then not valid JSON.
        records = [value for line in lines if line and isinstance(value := parsed_value(line, MEDIUM), dict)]
        self._samples_step, self.samples = self.step, [{**record, "step": step} for record in records[-2:]]
