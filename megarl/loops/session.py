"""What every loop works with: the ranks, the engines, the tracker, the validation sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.cluster.batching import RankModel
from megarl.cluster.worker_group import WorkerGroup
from megarl.config import Recipe, SamplingConfig
from megarl.config.parallel import ParallelConfig
from megarl.data.preferences import with_score_places
from megarl.loops.checkpointing import Checkpoints
from megarl.loops.resume import Origin
from megarl.loops.stopping import StopRequest
from megarl.rollout.batch import RLBatch
from megarl.rollout.evaluate import accuracy, failure_metrics
from megarl.rollout.groups import GroupSampler
from megarl.tracking.metrics import merge, values
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import Problem, SamplingSettings, StoppedError, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True)
class Session:
    """A run under way."""

    recipe: Recipe
    layout: ParallelConfig
    folder: RunFolder
    tracker: Tracker
    tokenizer: Tokenizer
    ranks: WorkerGroup
    models: Mapping[str, RankModel]
    """By name those that the recipe has: `policy`, `reference`, `critic`, `reward_model`."""
    sampler: GroupSampler
    validation: Mapping[str, list[Problem]]
    checkpoints: Checkpoints
    origin: Origin
    """What the run goes on from."""
    stop: StopRequest

    async def stop_if_asked(
        self,
        step: int,
        save_driver: Callable[[Path], None] | None = None,
        unlogged: Mapping[str, float] | None = None,
    ) -> None:
        """Save what `step` left and raise StoppedError, if a signal asked for it.

        `unlogged` are the step's metrics where its evaluation was cut short: the resumed run makes up for it, then logs
        them.
        """
        if not self.stop:
            return
        saved = "there is nothing to save yet"
        if step > 0:
            await self.ranks.call("sleep_engine")
            await self.checkpoints.save(step, save_driver, unlogged)
            saved = f"saved after step {step} of {self.recipe.train.steps}"
        raise StoppedError(f"{self.stop.by}: {saved}; go on with: megarl train {self.folder.path} --resume")

    async def add_scores(
        self, trajectories: Sequence[Trajectory], batch: RLBatch
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """Add the reward model's scores to the rewards of trajectories and of the batch that they make.

        Metrics: `reward/model`, `reward/model_std`, of its bare scores.
        """
        reward = self.recipe.reward
        ends = with_score_places(batch.select(batch.last_segments))
        found = await self.models["reward_model"].forward(ends)
        scores = found[ends.cu_seqlens[1:] - 1].astype(np.float64)
        metrics = {"reward/model": float(scores.mean()), "reward/model_std": float(scores.std())}
        held = scores if reward.model_clip is None else scores.clip(-reward.model_clip, reward.model_clip)
        rescored = []
        for trajectory, score in zip(trajectories, reward.model_weight * held, strict=True):
            if (own := trajectory.reward) is not None:
                own = replace(own, score=reward.function_weight * own.score + float(score))
            rescored.append(replace(trajectory, reward=own))
        batch.rewards = np.array([t.reward.score if t.reward else 0.0 for t in rescored])
        return rescored, metrics

    async def update_critic(self, batch: RLBatch) -> dict[str, float]:
        """A step's updates of the critic: `critic/loss`, `/grad_norm`, `/clipped` and so on, as `train/` has them."""
        minibatches = batch.critic_minibatches(self.recipe)
        updates = [await self.models["critic"].update(minibatch) for minibatch in minibatches]
        return {name.replace("train/", "critic/", 1): value for name, value in values(merge(updates)).items()}

    async def reshard(self, step: int) -> dict[str, float]:
        """Bring the trainer's weights into the engines; the slowest rank's seconds and the bytes of all.

        `reshard/probe_gap`: how far the log-probs of engines that convert their weights are, where they are compared.
        """
        every = self.recipe.weights.verify_every
        reports = await self.ranks.call("reshard", verify=every > 0 and step % every == 0)
        seconds = {
            f"time/reshard_{name}": max(r[name] for r in reports) for name in reports[0] if name.endswith("_seconds")
        }
        moved = {
            f"reshard/{name}": float(sum(r[name] for r in reports)) for name in reports[0] if name.endswith("_bytes")
        }
        gaps = {"reshard/probe_gap": max(r["probe_gap"] for r in reports)} if "probe_gap" in reports[0] else {}
        return seconds | moved | gaps

    @property
    def steps(self) -> range:
        """The steps that are still to be trained."""
        return range(self.folder.resumed_step + 1, self.recipe.train.steps + 1)

    async def evaluate(self, step: int) -> dict[str, float]:
        """`val/SET/accuracy` and what goes with it, of every validation set; the trajectories go to samples/.

        Raises AbandonedError, and writes nothing, where the run is to stop before all sets are through.
        """
        scalars: dict[str, float] = {}
        found: dict[str, list[Trajectory]] = {}
        sampling = sampling_settings(self.recipe.evaluation_sampling)
        with self.tracker.phase("evaluation"):
            for name, problems in self.validation.items():
                measured, found[name] = await accuracy(self.sampler, problems, sampling)
                scalars |= {f"val/{name}/{key}": value for key, value in measured.items()}
                failed_fraction = self.recipe.reward.max_failed_fraction
                scalars |= failure_metrics(found[name], failed_fraction, f"val/{name}/reward_")
        for name, trajectories in found.items():
            self.tracker.samples(step, [{"set": name} | trajectory.record() for trajectory in trajectories])
        return scalars

    def evaluates_at(self, step: int) -> bool:
        """Whether a step ends with an evaluation: every so many steps, and the last."""
        every = self.recipe.evaluation.every_steps
        data = self.recipe.data
        return bool(data.validation or data.validation_conversations) and (
            step == self.recipe.train.steps or (every > 0 and step % every == 0)
        )


def sampling_settings(config: SamplingConfig) -> SamplingSettings:
    """What a request carries of the recipe's sampling section."""
    return SamplingSettings(**config.model_dump())
