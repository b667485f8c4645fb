"""Recording of steps for `megarl replay` (`train.record`)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.cluster.rank_model import RankModel
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.config.recipe import to_yaml
from megarl.loops.observers.step_observer import StepObserver
from megarl.loops.step import Step, StepSamples
from megarl.platform.spans import span
from megarl.reshard.checks.fingerprint import Fingerprint
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.step_record import COMPARED_METRICS, StepRecord, batch_arrays, compute_digests
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.run_folder import RECORDS

METRICS = (
    MetricRow(
        "record/seconds",
        "s",
        "time to record the step: fingerprints of the trainer's state, and writing",
        condition="train.record",
    ),
    MetricRow(
        "record/bytes_per_token",
        "bytes",
        "size of the step's record per token of its samples",
        condition="train.record",
    ),
)

_LAYOUT_FIELDS = ("tp", "pp", "dp", "cp", "vpp", "ep", "etp", "order", "rank_permutation")
"""Parallel sizes and orders that place the trainer's parts on ranks."""


class StepRecorder(StepObserver):
    """Writes records of steps to `records/` in the run folder."""

    def __init__(self, recipe: Recipe, parallel: ParallelConfig, run: Path, policy: RankModel) -> None:
        self._recipe, self._parallel, self._policy = recipe, parallel, policy
        self._folder = run / RECORDS

    async def observe_batch(self, step: Step, samples: StepSamples, batch: RLBatch) -> None:
        """Record a step after its updates, and add the metrics in `METRICS`. Does nothing without train.record."""
        if self._recipe.train.record is None:
            return
        record_began = time.monotonic()
        with span("record"):
            is_complete = self._recipe.train.record == "all"
            record = await make_record(
                self._policy,
                self._recipe,
                self._parallel,
                step.number,
                samples,
                batch,
                step.metrics,
                is_complete=is_complete,
            )
            # A thread: the driver answers other calls while a large record is written.
            num_bytes = await asyncio.to_thread(record.save, self._folder)
        step.log(
            {
                "record/seconds": time.monotonic() - record_began,
                "record/bytes_per_token": num_bytes / max(record.num_tokens, 1),
            }
        )


async def make_record(
    policy: RankModel,
    recipe: Recipe,
    parallel: ParallelConfig,
    step: int,
    samples: StepSamples,
    batch: RLBatch,
    metrics: Mapping[str, float],
    *,
    is_complete: bool,
) -> StepRecord:
    """Return the record of a step after its updates.

    `is_complete` includes the values of the batch's arrays, and fingerprints of main weights and moments.
    """
    arrays = batch_arrays(batch)
    borders = batch.cu_samples
    reports = await policy.group.call("weight_checks.state_fingerprints", is_complete)
    state: dict[str, dict[int, Fingerprint]] = {}
    for rank, fingerprints in enumerate(reports):
        for name, fingerprint in fingerprints.items():
            state.setdefault(name, {})[rank] = fingerprint
    return StepRecord(
        step=step,
        recipe=to_yaml(recipe),
        layout=layout_values(recipe, parallel),
        kl_coefficient=samples.kl_coefficient,
        role_baselines=samples.role_baselines,
        groups=samples.groups,
        waiting=samples.waiting,
        arrays=arrays if is_complete else {},
        digests=compute_digests({"token_ids": batch.token_ids, **arrays}, borders),
        borders=borders,
        metrics={name: metrics[name] for name in COMPARED_METRICS if name in metrics},
        state=state,
    )


def layout_values(recipe: Recipe, parallel: ParallelConfig) -> dict[str, Any]:
    """Return what decides the trainer's rounding, as JSON values: parallel sizes, dtype and the section trainer."""
    # Through JSON, so that they equal the values read from a record.
    sizes = {name: getattr(parallel, name) for name in _LAYOUT_FIELDS}
    return json.loads(
        json.dumps({**sizes, "dtype": recipe.model.dtype, "trainer": recipe.trainer.model_dump(mode="json")})
    )
