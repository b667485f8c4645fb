"""Seconds of a training step: phases of trainer and engines, one after another or at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.planner.seconds.gpus import GpuSpeeds
from megarl.planner.seconds.lengths import Lengths
from megarl.planner.seconds.work import ModelWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Samples of a training step, and how they are trained."""

    lengths: Lengths
    num_prompts: int
    samples_per_prompt: int
    updates: int
    scoring_passes: float
    """Passes without gradients over the batch: reference, and old log-probs (below 1 if some samples need none)."""
    staleness: int = 0
    """Steps by which separate engines may sample ahead."""

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    @property
    def tokens(self) -> float:
        return self.num_samples * float(self.lengths.sequences.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Predicted seconds of a step by phase."""

    rollout: float
    logprobs: float
    train: float
    reshard: float
    offload: float = 0.0
    """Moving trainer states to host memory and back."""
    other: float = 0.0
    """Work outside the phases: `Constants.sample_seconds` times the number of samples."""
    is_concurrent: bool = False
    """Whether engines sample while the trainer works."""

    @property
    def step(self) -> float:
        trainer_seconds = self.logprobs + self.train
        phase_seconds = max(self.rollout, trainer_seconds) if self.is_concurrent else self.rollout + trainer_seconds
        return phase_seconds + self.reshard + self.offload + self.other


def moved_seconds(shard_bytes: float, *, link: float, memory: float) -> float:
    """Return a lower bound of a reshard's seconds. Weights are read and written once.

    `shard_bytes`: weights of an engine rank. `link`, `memory`: bytes per second.
    """
    return max(shard_bytes / link, 2 * shard_bytes / memory)


def reshard_seconds(work: ModelWork, tp: int, gpu: GpuSpeeds, *, is_separate: bool, item_bytes: int = 2) -> float:
    """Return a lower bound of the seconds of a reshard to engines of `tp` ranks.

    An engine rank's weights cross its link once: the network to separate engines, else NVLink. `item_bytes`: bytes per
    weight.
    """
    link = gpu.network if is_separate else gpu.nvlink
    return moved_seconds(item_bytes * work.weights / tp, link=link, memory=gpu.memory)
