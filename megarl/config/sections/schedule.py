"""Recipe sections `train`, `evaluation`, `weights` and `checkpoint`: what a run does, and at which steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from megarl.config.annotations import OnlyIf, UntriedOnGpu
from megarl.config.conditions import (
    BEST,
    ENGINE,
    LOSSES,
    ON_POLICY,
    PACED,
    RL,
    SPIKES,
    UNPACED,
    instead_of,
    left_out,
    non_empty,
    one_of,
)
from megarl.config.section import Section
from megarl.config.sections.sampling import EvaluationSamplingConfig


class TrainConfig(Section):
    """Batch sizes, length of the run, and its stop conditions."""

    steps: Annotated[NonNegativeInt, OnlyIf(instead_of("train.epochs"))] = 100
    """Number of training steps: rollouts in loops rl and distillation, optimizer updates in other loops. 0: only
    evaluate the validation sets."""
    epochs: Annotated[PositiveFloat | None, OnlyIf(left_out("mixture"))] = None
    """Number of passes over the training data, instead of `steps`: steps = records * epochs / prompts_per_step, rounded
    up. Prompts drawn again by dynamic sampling do not count."""
    prompts_per_step: PositiveInt = 32
    """Batch size of a step: prompts in rl and distillation, conversations in sft, pairs in preference and
    reward_model."""
    samples_per_prompt: Annotated[PositiveInt, OnlyIf(ON_POLICY)] = 8
    """Group size: completions per prompt (rl, distillation)."""
    updates_per_step: Annotated[PositiveInt, OnlyIf(ON_POLICY)] = 1
    """Number of minibatches in a step (rl, distillation), each one optimizer update."""
    epochs_per_step: Annotated[PositiveInt, OnlyIf(ON_POLICY)] = 1
    """Number of times that a step trains on all its samples (rl, distillation). Each pass has updates_per_step
    minibatches. From the second pass on, the samples are shuffled. Field for the critic: critic.updates_per_step."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Numbers of the steps to profile with train.profile_with. Results: profiles/ in the run folder. With
    weights.overlap, a profiled step first waits for all weights to arrive."""
    profile_with: Annotated[
        tuple[Literal["spans", "torch", "memory"], ...],
        Field(min_length=1),
        OnlyIf(non_empty("train.profile_steps", "[2]")),
    ] = ("spans",)
    """Profilers. spans (default): time spans of driver and ranks, step_NNNNNN.json, for ui.perfetto.dev. torch:
    torch.profiler with NVTX ranges, a trace per rank in step_NNNNNN/; slows the step. memory: snapshots of the CUDA
    allocator per rank, for pytorch.org/memory_viz."""
    record: Annotated[Literal["tokens", "all"] | None, OnlyIf(RL, left_out("trainer.router_replay")),
        UntriedOnGpu("tokens, all")] = None  # fmt: skip
    """Record each step in records/ of the run folder, for `megarl replay` (loop rl). tokens: trajectories, checksums of
    log-probs and advantages, and fingerprints (checksum and sketch) of the weights. all: also the values of log-probs
    and advantages, and fingerprints of the optimizer's state. Default: no records. Metrics: record/."""
    max_logprob_gap: Annotated[PositiveFloat | None, OnlyIf(ON_POLICY, UNPACED)] = None
    """Maximum mean distance between trainer and engine log-probs, in nats (metric logprob_gap/mean; rl, distillation).
    Above it, the step's remaining updates are skipped. Default: none. Metric: train/gap_exceeded."""
    on_logprob_gap: Annotated[
        Literal["stop", "skip"], OnlyIf(ON_POLICY, UNPACED, non_empty("train.max_logprob_gap"))
    ] = "stop"
    """Action after a step above max_logprob_gap. stop (default): save a checkpoint and end the run with exit code 70.
    skip: continue with the next step."""
    # Records cannot contain rollbacks, and a replay does not apply these limits.
    on_spike: Annotated[Literal["ignore", "skip", "rollback", "stop"], OnlyIf(left_out("train.record")),
        UntriedOnGpu("skip, rollback, stop")] = "ignore"  # fmt: skip
    """Action if an update of the policy is a spike (spike_factor, spike_loss_factor). ignore (default): apply it. skip:
    drop it and continue. rollback: drop it, load the newest checkpoint, continue with new data. stop: drop it, save and
    end with exit code 79. Metrics: train/spikes, train/rollbacks (megarl/training/README.md#spikes)."""
    spike_factor: Annotated[float, Field(gt=1.0), OnlyIf(SPIKES)] = 10.0
    """An update is a spike if its gradient norm before clipping is above this factor times the median of the last
    spike_window updates."""
    spike_loss_factor: Annotated[float | None, Field(gt=1.0), OnlyIf(SPIKES, LOSSES)] = 2.0
    """An update is a spike too if its loss is above this factor times the median. null: losses are not compared."""
    spike_window: Annotated[PositiveInt, OnlyIf(SPIKES)] = 32
    """Number of updates in the median of spike_factor and spike_loss_factor. No spike is detected before half this
    number of updates."""
    max_rollbacks: Annotated[NonNegativeInt, OnlyIf(one_of("train.on_spike", "rollback"))] = 3
    """Maximum number of rollbacks in a run. The next spike stops the run, as with on_spike = stop."""
    on_unhealthy: Literal["warn", "stop"] = "warn"
    """Action when a health rule is first broken (section `health`). warn (default): only warn. stop: warn, save a
    checkpoint and end the run with exit code 79."""

    @property
    def num_updates(self) -> int:
        return self.epochs_per_step * self.updates_per_step


class EvaluationConfig(Section):
    """When and how the validation sets are evaluated."""

    every_steps: NonNegativeInt = 0
    """Evaluate the validation sets before the first step, every n steps, and after the last step. 0 (default): only
    before the first and after the last step."""
    at_start: bool = True
    """Evaluate before the first step (default: true). A run of 0 steps always evaluates."""
    max_problems: PositiveInt | None = None
    """Evaluate only the first n records of each validation set. Default: all."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024), OnlyIf(*ENGINE)] = 1
    """Number n of attempts at each validation problem. Accuracy is their mean (avg@n)."""
    k: Annotated[tuple[PositiveInt, ...], OnlyIf(*ENGINE)] = ()
    """Values of k for pass@k and majority@k, unbiased estimates from n attempts (samples_per_prompt). Default: n, if
    above 1. majority@k needs a reward function that reads final answers (boxed, think_answer_tags, gsm8k,
    math_competition, multiple_choice, reasoning_gym). Metrics: val/SET/pass_at_4, val/SET/majority_at_4."""
    sampling: Annotated[EvaluationSamplingConfig, OnlyIf(*ENGINE)] = EvaluationSamplingConfig()
    """Sampling parameters of evaluations."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k for pass@k and majority@k."""
        return self.k or ((self.samples_per_prompt,) if self.samples_per_prompt > 1 else ())


class WeightsConfig(Section):
    """Reshard: copies new weights from the trainer into the engines, and verifies them."""

    bucket_mib: PositiveInt = 256
    """Size of a reshard bucket in MiB. Weights are sent bucket by bucket, with at most two buckets in memory."""
    # With max_staleness 0 the next step needs the new weights first. Engines pause during the whole transfer.
    # The trainer waits for a running transfer before the next reshard, before an evaluation, after the last step, and
    # after a replica came back.
    overlap: Annotated[bool, OnlyIf(RL, PACED), UntriedOnGpu("true")] = False
    """Send weights from a copy while the next step already samples: the trainer waits only for the copy. For placement
    separate with max_staleness above 0. Needs memory for a second copy of a trainer rank's weights. Default: false.
    Metrics: time/reshard_hidden_seconds, time/reshard_waited_seconds."""
    verify_every: Annotated[NonNegativeInt, OnlyIf(*ENGINE)] = 50
    """Compare the engines' weights with the trainer's before training and after the reshard of every n-th step: by
    checksums, or if the engine converts its weights (to FP8, for example) by log-probs of a prompt. 0: only before
    training."""
    # A check needs two checksums of the trainer's weights and two of the engines', each a pass over the memory.
    check_every: NonNegativeInt = 0
    """Compute checksums of the weights after every n-th step. Trainer and engines are compared with them before weights
    are used, saved or sent. A changed bit ends the run; the message names tensor and rank. 0 (default): never. Metric:
    time/weight_check_seconds. See megarl/training/README.md#checksums-of-each-version."""
    canary_every: Annotated[NonNegativeInt, UntriedOnGpu("1 and more")] = 0
    """Before the updates of every n-th step, compute a fixed batch of random tokens twice on every trainer rank. If
    bits differ between passes or replicas, the run ends with exit code 76 and excludes the faulty node. 0 (default):
    never. Metric: time/canary_seconds. See megarl/training/README.md#canary."""
    probe_tolerance: Annotated[PositiveFloat | None, OnlyIf(*ENGINE)] = None
    """Maximum mean difference between trainer and engine log-probs after a reshard, in nats (metric reshard/probe_gap).
    A larger one ends the run. Default: 0.001 in float32, 0.1 in bfloat16. Quantised weights may need more."""

    def is_checked(self, version: int) -> bool:
        """Return whether a version gets checksums. The update of step n makes version n + 1."""
        return self.check_every > 0 and (version - 1) % self.check_every == 0


class CheckpointConfig(Section):
    """Checkpoints and exports during a run."""

    every_steps: NonNegativeInt = 0
    """Save a checkpoint every n steps and after the last, for `megarl train --resume`. 0 (default): never."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep. The oldest is removed once a newer one is complete."""
    asynchronous: bool = True
    """Write checkpoints in the background while training continues, from a copy in host memory. Default: true."""
    replicate: Annotated[NonNegativeInt, UntriedOnGpu("a number above 0")] = 0
    """Every n steps, copy each rank's training state to host memory of two nodes, for cluster.recover = restart or
    shrink. 0: never. Default: 1 (10 in loops that do not sample); 0 with another cluster.recover, or if copies need
    more than 3/4 of a node's memory. `megarl plan` shows the memory. See megarl/loops/README.md."""
    export_every_steps: NonNegativeInt = 0
    """Export the model as a Hugging Face folder, hf_step_NNNNNN, every n steps. 0 (default): only at the end, as hf."""
    best: Annotated[str | None, OnlyIf(BEST)] = None
    """Evaluation metric that selects the best step, for example val/SET/accuracy: the largest value (for metrics ending
    in /loss the smallest), of equal values the first. The step's model is exported to hf_best/ (with best.json: step
    and value). Its checkpoint, if any, is kept in addition to the newest ones."""
