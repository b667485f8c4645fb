"""Recording of steps for `megarl replay` (`train.record`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.cluster.rank_model import RankModel
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.platform.spans import span
from megarl.reshard.fingerprint import Fingerprint
from megarl.rollout.rl_batch import RLBatch
from megarl.rollout.step_record import COMPARED_METRICS, StepRecord, batch_arrays, digests_of
from megarl.types import Group

METRICS = {
    "record/seconds": ("s", "time to record the step (train.record): fingerprints of the trainer's state, and writing"),
    "record/bytes_per_token": ("bytes", "size of the step's record per token of its samples"),
}
"""Metrics reported by this module: unit and meaning by metric name. `megarl metrics` lists them."""

LAYOUT_FIELDS = ("tp", "pp", "dp", "cp", "vpp", "ep", "etp", "order")
"""Fields of a layout that can change the trainer's rounding."""

RECORDS = "records"
"""Folder of the records in a run folder."""


class StepRecorder:
    """Writes records of steps to `records/` in the run folder, as train.record says. `ranks` have the policy."""

    def __init__(self, recipe: Recipe, layout: ParallelConfig, run: Path, policy: RankModel) -> None:
        self._recipe, self._layout, self._policy = recipe, layout, policy
        self._folder = run / RECORDS

    async def write(
        self,
        step: int,
        groups: Sequence[Group],
        batch: RLBatch,
        metrics: Mapping[str, float],
        kl_coefficient: float,
    ) -> dict[str, float]:
        """Record a step after its updates. Returns the metrics of this module; empty without train.record.

        `groups` are the sampled trajectories, before the trainer's log-probs. `kl_coefficient` is that of the step.
        """
        if self._recipe.train.record is None:
            return {}
        began = time.monotonic()
        with span("record"):
            record = await make_record(
                self._policy,
                self._layout,
                step,
                groups,
                batch,
                metrics,
                kl_coefficient,
                is_complete=self._recipe.train.record == "all",
            )
            # A thread: the driver answers other calls while a large record is written.
            num_bytes = await asyncio.to_thread(record.save, self._folder)
        return {
            "record/seconds": time.monotonic() - began,
            "record/bytes_per_token": num_bytes / max(record.num_tokens, 1),
        }


async def make_record(
    policy: RankModel,
    layout: ParallelConfig,
    step: int,
    groups: Sequence[Group],
    batch: RLBatch,
    metrics: Mapping[str, float],
    kl_coefficient: float,
    *,
    is_complete: bool,
) -> StepRecord:
    """Return the record of a step after its updates.

    With `is_complete` it has the values of the batch's arrays, and fingerprints of main weights and moments.
    """
    arrays = batch_arrays(batch)
    borders = batch.cu_samples
    reports = await policy.group.call("state_fingerprints", is_complete)
    state: dict[str, dict[int, Fingerprint]] = {}
    for rank, found in enumerate(reports):
        for name, one in found.items():
            state.setdefault(name, {})[rank] = one
    return StepRecord(
        step=step,
        layout={name: getattr(layout, name) for name in LAYOUT_FIELDS},
        kl_coefficient=kl_coefficient,
        groups=groups,
        arrays=arrays if is_complete else {},
        digests=digests_of({"token_ids": batch.token_ids, **arrays}, borders),
        borders=borders,
        metrics={name: metrics[name] for name in COMPARED_METRICS if name in metrics},
        state=state,
    )
