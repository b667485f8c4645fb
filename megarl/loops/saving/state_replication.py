"""Copies of a run's state in host memory (checkpoint.replicate), used after the loss of a rank."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.state_copies import drop_others, hold
from megarl.tracking.metric_rows import ALL_RANKS, MetricRow

METRICS = (
    MetricRow(
        "time/state_copy_seconds",
        "seconds",
        "how long the step waited for copies of the training state to host memory",
        condition="checkpoint.replicate",
    ),
    MetricRow(
        "checkpoint/copy_bytes",
        "bytes",
        "size of the step's copy of the training state",
        ALL_RANKS,
        condition="checkpoint.replicate",
    ),
)


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """A step whose state all ranks have copied. `driver` is a folder with the driver's part, as in a checkpoint.

    `checksum` is the policy's, `spikes` the state of the spike detector; None: there is none.
    """

    step: int
    driver: Path
    checksum: str | None
    spikes: Mapping[str, Any] | None


class StateReplication:
    """Copies the state every `every_steps` steps (0: never). The driver's part goes to subfolders of `folder`.

    Ranks send their copies to a rank on another node during the next step. A new copy begins only when all ranks have
    the previous one.
    """

    def __init__(self, every_steps: int, folder: Path) -> None:
        self._every_steps, self._folder = every_steps, folder
        self._copy_in_progress: CopiedStep | None = None
        self.newest: CopiedStep | None = None
        """Newest step with complete copies on all ranks."""
        self._metrics: dict[str, float] = {}

    async def begin_copy(
        self,
        ranks: WorkerGroup,
        step: int,
        save_driver: Callable[[Path], None] | None,
        checksum: str | None,
        spikes: Mapping[str, Any] | None,
        *,
        is_forced: bool = False,
        is_resharded: bool = False,
    ) -> None:
        """Start copying the state after a step, if due or `is_forced`. Waits for an unfinished earlier copy.

        Does nothing if complete copies of this step exist. `save_driver` writes the driver's state into a folder.
        `checksum` and `spikes` are stored with the copy. `is_resharded`: the engines already have these weights.
        """
        if not is_forced and (not self._every_steps or step % self._every_steps):
            return
        start_time = time.monotonic()
        await self.complete_copy(ranks, wait=True)
        if self.newest is not None and self.newest.step == step:
            return
        driver_folder = self._folder / f"step_{step:06d}"
        # A lost rank may have left an incomplete copy.
        shutil.rmtree(driver_folder, ignore_errors=True)
        driver_folder.mkdir(parents=True)
        if save_driver:
            save_driver(driver_folder)
        num_bytes = sum(await ranks.call("replicated_state.begin", step, is_resharded))
        self._copy_in_progress = CopiedStep(step, driver_folder, checksum, spikes)
        self._metrics = {
            "time/state_copy_seconds": time.monotonic() - start_time,
            "checkpoint/copy_bytes": float(num_bytes),
        }

    async def renew_copies(self, ranks: WorkerGroup) -> None:
        """Copy the restored state again, unless `every_steps` is 0. A restore may give ranks other parts of it."""
        if not self._every_steps or self.newest is None:
            return
        await ranks.call("replicated_state.begin", self.newest.step, False)
        self._copy_in_progress = self.newest

    async def complete_copy(self, ranks: WorkerGroup, *, wait: bool = False) -> None:
        """Record the copy in progress as complete if all ranks have it. With `wait`, wait for them."""
        if self._copy_in_progress is None:
            return
        files_of_ranks = await ranks.call("replicated_state.finish", wait)
        if None in files_of_ranks:
            return
        # From now on the copies outlive the ranks. Only then may they overwrite the copies of the step before.
        try:
            await hold(ranks, files_of_ranks)
        except OSError:
            # A rank that ended since its answer has no files left. Then this call raises the error that names the rank.
            await ranks.call("replicated_state.finish", False)
            raise
        await drop_others([place.agent for place in ranks.places], self._copy_in_progress.step)
        previous, self.newest, self._copy_in_progress = self.newest, self._copy_in_progress, None
        if previous is not None and previous.driver != self.newest.driver:
            shutil.rmtree(previous.driver, ignore_errors=True)

    def forget_copy_in_progress(self) -> None:
        """Forget the copy in progress, because a rank was lost."""
        self._copy_in_progress = None

    def take_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics
