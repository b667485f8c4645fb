"""Recipe sections `train`, `evaluation`, `weights` and `checkpoint`: what a run does, and at which steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from megarl.config.annotations import Foreign, OnlyIf, UntriedOnGpu
from megarl.config.conditions import (
    ENGINE,
    EVALUATED,
    LOSSES,
    ON_POLICY,
    PACED,
    RL,
    SPIKES,
    UNPACED,
    given,
    instead_of,
    left_out,
    one_of,
)
from megarl.config.sampling import EvaluationSamplingConfig
from megarl.config.section import Section


class TrainConfig(Section):
    """Batch sizes, length of the run, and its stop conditions."""

    steps: Annotated[NonNegativeInt, OnlyIf(instead_of("train.epochs")),
        Foreign("total_training_steps max_num_steps max_train_steps total_steps", example="200",
            verl="trainer.total_training_steps", slime="--num-rollout", TRL="max_steps"),
        Foreign("eval_only", note="0; or: megarl eval MODEL RECIPE")] = 100  # fmt: skip
    """Number of training steps: rollouts in loops rl and distillation, optimizer updates in other loops. 0: only
    evaluate the validation sets."""
    epochs: Annotated[PositiveFloat | None, OnlyIf(left_out("mixture")),
        Foreign("total_epochs max_num_epochs num_episodes num_epochs n_epochs num_epoch", example="2", short="e",
            RL2="trainer.n_epochs", verl="trainer.total_epochs", TRL="num_train_epochs")] = None  # fmt: skip
    """Number of passes over the training data. Use it instead of `steps`: steps = number of records * epochs /
    prompts_per_step, rounded up. Prompts drawn again by dynamic sampling are not counted."""
    prompts_per_step: Annotated[PositiveInt,
        Foreign("num_prompts_per_step train.batch_size batch_size prompts_per_rollout consumer_batch_size",
            example="64", RL2="data.prompts_per_rollout", verl="data.train_batch_size", slime="--rollout-batch-size",
            AReaL="rollout.consumer_batch_size"),
        Foreign(note="over all inferencers: ibs * num_inferencer", example="128", short="ibs",
            ColossalRL="--inference-batch-size"),
        Foreign(hint="verl: prompts of a step; OpenRLHF: samples of an update; ColossalRL: updates_per_step is ibs * "
            "num_inferencer / (tbs * dp)", remark="is ibs * num_inferencer / (tbs * dp)",
            example="train.updates_per_step=2", also="train.updates_per_step", short="tbs",
            ColossalRL="--train-batch-size"),
        Foreign(note="the two multiplied, over all ranks",
            example="train.prompts_per_step=64 train.samples_per_prompt=1 algorithm.preset=ppo",
            ColossalChat="--num_collect_steps --experience_batch_size"),
        Foreign("generation_batch_size", note="a step's prompts over all ranks; the number of microbatches follows",
            example="train.prompts_per_step=64 trainer.max_tokens_per_microbatch=8192",
            also="trainer.max_tokens_per_microbatch",
            TRL="per_device_train_batch_size gradient_accumulation_steps")] = 32  # fmt: skip
    """Batch size of a step: prompts in rl and distillation, conversations in sft, pairs in preference and
    reward_model."""
    samples_per_prompt: Annotated[PositiveInt, OnlyIf(ON_POLICY),
        Foreign("rollout.n num_generations_per_prompt responses_per_prompt rollouts_per_example", short="g",
            ColossalRL="--num-generations", RL2="data.responses_per_prompt", verl="actor_rollout_ref.rollout.n",
            slime="--n-samples-per-prompt", TRL="num_generations",
            prime_rl="orchestrator.rollouts_per_example")] = 8  # fmt: skip
    """Group size: completions per prompt (rl, distillation)."""
    updates_per_step: Annotated[PositiveInt, OnlyIf(ON_POLICY),
        Foreign("update_per_rollout", example="4", RL2="actor.update_per_rollout"),
        Foreign("ppo_mini_batch_size mini_batch_size train_global_batch_size num_mini_batches",
            note="number of updates per step", example="4", verl="actor_rollout_ref.actor.ppo_mini_batch_size",
            slime="--global-batch-size --num-steps-per-rollout", TRL="steps_per_generation")] = 1  # fmt: skip
    """Number of minibatches in a step of loop rl. Each is one optimizer update."""
    epochs_per_step: Annotated[PositiveInt, OnlyIf(ON_POLICY),
        Foreign(remark="passes over the samples of a step", example="5", ColossalChat="--num_update_steps"),
        Foreign("ppo_epochs num_ppo_epochs", verl="actor_rollout_ref.actor.ppo_epochs",
            TRL="num_iterations")] = 1  # fmt: skip
    """Number of passes over a step's samples in loop rl, each with updates_per_step minibatches. From the second pass
    on, samples are shuffled. For the critic see critic.updates_per_step."""
    profile_steps: Annotated[tuple[PositiveInt, ...],
        Foreign("global_profiler.steps profile_steps profile_step_start",
            remark="a Chrome trace; no rollout is made longer for it", example="[2]",
            ColossalRL="--enable_profiling")] = ()  # fmt: skip
    """Numbers of the steps to profile, by the means of train.profile_with. The results are in the run folder's
    profiles/. With weights.overlap, a profiled step first waits until all weights have arrived."""
    profile_with: Annotated[tuple[Literal["spans", "torch", "memory"], ...], Field(min_length=1),
        OnlyIf(given("train.profile_steps", "[2]")),
        Foreign("global_profiler.tool", example='["spans","torch"]',
            remark="torch: torch.profiler; memory: CUDA's allocator")] = ("spans",)  # fmt: skip
    """Means of profiling. spans (default): time spans of driver and ranks, step_NNNNNN.json, for ui.perfetto.dev.
    torch: torch.profiler with NVTX ranges, a trace per rank in step_NNNNNN/; slows the step. memory: snapshots of the
    CUDA allocator per rank, for pytorch.org/memory_viz."""
    record: Annotated[Literal["tokens", "all"] | None, OnlyIf(RL, left_out("trainer.router_replay")),
        UntriedOnGpu("tokens, all")] = None  # fmt: skip
    """Record each step in the run folder's records/, for `megarl replay`. Only in loop rl. tokens: trajectories,
    checksums of log-probs and advantages, and fingerprints (checksum and sketch) of the weights. all: also the values
    of log-probs and advantages, and fingerprints of the optimizer's state. Default: no records. Metrics: record/."""
    max_logprob_gap: Annotated[PositiveFloat | None, OnlyIf(ON_POLICY, UNPACED)] = None
    """Maximum mean distance between trainer and engine log-probs, in nats (metric logprob_gap/mean; rl, distillation).
    If it is larger, the step's remaining updates are skipped. Default: none. Metric: train/gap_exceeded."""
    on_logprob_gap: Annotated[Literal["stop", "skip"], OnlyIf(ON_POLICY, UNPACED, given("train.max_logprob_gap"))] = (
        "stop"
    )
    """Action after a step above max_logprob_gap. stop (default): save a checkpoint and end the run with exit code 70.
    skip: continue with the next step."""
    # A record has no rollbacks, and a replay has no limits.
    on_spike: Annotated[Literal["ignore", "skip", "rollback", "stop"], OnlyIf(left_out("train.record")),
        UntriedOnGpu("skip, rollback, stop")] = "ignore"  # fmt: skip
    """Action for an update of the policy above spike_factor or spike_loss_factor. ignore (default): none. The others
    drop it. skip: go on. rollback: load the newest checkpoint, and go on with new data. stop: save and end with exit
    code 79. Metrics: train/spikes, train/rollbacks (megarl/training/README.md#spikes)."""
    spike_factor: Annotated[float, Field(gt=1.0), OnlyIf(SPIKES)] = 10.0
    """An update is a spike if its gradient norm before clipping is above this factor times the median of the last
    spike_window updates."""
    spike_loss_factor: Annotated[float | None, Field(gt=1.0), OnlyIf(SPIKES, LOSSES)] = 2.0
    """An update is a spike too if its loss is above this factor times the median. null: losses are not compared."""
    spike_window: Annotated[PositiveInt, OnlyIf(SPIKES)] = 32
    """Number of updates in the median. Spikes are found once half of them are done."""
    max_rollbacks: Annotated[NonNegativeInt, OnlyIf(one_of("train.on_spike", "rollback"))] = 3
    """Maximum number of rollbacks in a run. One more spike stops the run, as with on_spike = stop."""
    on_unhealthy: Literal["warn", "stop"] = "warn"
    """Action when a health rule is first broken (section `health`). warn (default): only warn. stop: warn, save a
    checkpoint and end the run with exit code 79."""

    @property
    def num_updates(self) -> int:
        """Return the number of optimizer updates of the policy in one step of loop rl."""
        return self.epochs_per_step * self.updates_per_step


class EvaluationConfig(Section):
    """When and how the validation sets are evaluated."""

    every_steps: Annotated[NonNegativeInt,
        Foreign("test_freq val_period", example="100", short="ei", RL2="trainer.test_freq", verl="trainer.test_freq",
            slime="--eval-interval", TRL="eval_steps")] = 0  # fmt: skip
    """Evaluate the validation sets every n steps. 0 (default): only before the first and after the last step. An n
    above 0 includes these two."""
    at_start: Annotated[bool,
        Foreign("val_before_train val_at_start", example="false", verl="trainer.val_before_train"),
        Foreign(example="true", TRL="eval_on_start")] = True  # fmt: skip
    """Evaluate before the first step (default: true). A run of 0 steps always evaluates."""
    max_problems: Annotated[PositiveInt | None, Foreign("max_val_samples")] = None
    """Evaluate only the first n records of each validation set. Default: all."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024), OnlyIf(*ENGINE),
        Foreign("val_kwargs.n n_samples_per_eval_prompt eval_n_samples_per_prompt",
            remark="metrics pass_at_4, majority_at_4", example="4",
            verl="actor_rollout_ref.rollout.val_kwargs.n")] = 1  # fmt: skip
    """Number n of attempts at each validation problem. Accuracy is their mean (avg@n)."""
    k: Annotated[tuple[PositiveInt, ...], OnlyIf(*ENGINE)] = ()
    """Values of k for pass@k and majority@k, estimated without bias from n attempts (samples_per_prompt). Default: n,
    if above 1. majority@k needs a reward function that reads final answers (boxed, think_answer_tags, gsm8k,
    math_competition, multiple_choice, reasoning_gym). Metrics: val/SET/pass_at_4, val/SET/majority_at_4."""
    sampling: Annotated[EvaluationSamplingConfig, OnlyIf(*ENGINE),
        Foreign("test_sampling_params test_sampling_params.temperature test_sampling_params.max_new_tokens",
            "test_sampling_params.top_p test_sampling_params.top_k", example="evaluation.sampling.temperature=0",
            RL2="rollout.test_sampling_params.temperature"),
        Foreign("val_kwargs eval_temperature val_kwargs.temperature", example="evaluation.sampling.temperature=0.6",
            verl="actor_rollout_ref.rollout.val_kwargs.temperature")] = EvaluationSamplingConfig()  # fmt: skip
    """Sampling parameters of evaluations."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Return the values of k for pass@k and majority@k."""
        return self.k or ((self.samples_per_prompt,) if self.samples_per_prompt > 1 else ())


class WeightsConfig(Section):
    """Reshard: how new weights are copied from the trainer into the engines, and verified."""

    bucket_mib: PositiveInt = 256
    """Size of a reshard bucket in MiB. Weights are sent bucket by bucket, with at most two in memory."""
    # With max_staleness 0 the next step needs the new weights first. Engines pause for the whole transfer in any case.
    # The trainer waits for a running transfer before the next reshard, before an evaluation, after the last step, and
    # after a replica came back.
    overlap: Annotated[bool, OnlyIf(RL, PACED), UntriedOnGpu("true")] = False
    """Send weights from a copy while the next step already samples, so that the trainer waits only for the copy
    (placement separate, max_staleness above 0). Needs memory for a second copy of a trainer rank's weights. Default:
    false. Metrics: time/reshard_hidden_seconds, time/reshard_waited_seconds."""
    verify_every: Annotated[NonNegativeInt, OnlyIf(*ENGINE)] = 50
    """Check the engines' weights against the trainer's before training and after the reshard of every n-th step, by
    checksums. If the engine converts its weights (to FP8, for example): by log-probs of a prompt. 0: only before
    training."""
    # A check needs two checksums of the trainer's weights and two of the engines', each a pass over the memory.
    check_every: NonNegativeInt = 0
    """Compute checksums of the weights after every n-th step, in trainer and engines. They are compared before the next
    update, save and export, after each reshard, and before engines get new weights. A changed bit ends the run, and the
    message names tensor and rank. 0 (default): never. Metric: time/weight_check_seconds. The checksums are in
    versions.jsonl (megarl/training/README.md#checksums-of-each-version)."""
    canary_every: Annotated[NonNegativeInt, UntriedOnGpu("1 and more")] = 0
    """Before the updates of every n-th step, compute a fixed batch of random tokens twice on every trainer rank. Both
    passes and all replicas must give equal bits. Otherwise the run ends with exit code 76, and the faulty node is
    excluded (megarl/training/README.md#canary). 0 (default): never. Metric: time/canary_seconds."""
    probe_tolerance: Annotated[PositiveFloat | None, OnlyIf(*ENGINE)] = None
    """Maximum mean difference between trainer and engine log-probs after a reshard, in nats (metric reshard/probe_gap).
    If it is larger, the run ends. Default: 0.001 in float32, 0.1 in bfloat16. Quantised weights may need more."""

    def is_checked(self, version: int) -> bool:
        """Return whether checksums of a version are computed. The update of step n makes version n + 1."""
        return self.check_every > 0 and (version - 1) % self.check_every == 0


class CheckpointConfig(Section):
    """Checkpoints and exports during a run."""

    every_steps: Annotated[NonNegativeInt,
        Foreign("save_freq save_period", example="100", short="si", ColossalChat="--save_interval",
            RL2="actor.save_freq", verl="trainer.save_freq", slime="--save-interval",
            TRL="save_steps")] = 0  # fmt: skip
    """Save a checkpoint every n steps and after the last, for `megarl train --resume`. 0 (default): never."""
    keep: Annotated[PositiveInt, Foreign("max_actor_ckpt_to_keep save_total_limit keep_top_k max_ckpt_num")] = 2
    """Number of newest checkpoints to keep. An older one is removed when a newer one is complete."""
    asynchronous: Annotated[bool, Foreign("async_save")] = True
    """Write checkpoints in the background while training continues, from a copy in host memory. Default: true."""
    replicate: Annotated[NonNegativeInt, UntriedOnGpu("a number above 0")] = 0
    """Every n steps, copy each rank's training state to host memory of its own node and of another one. If a process or
    node is lost, cluster.recover (restart, shrink) continues from the copies. `megarl plan` shows the memory. 0
    (default): never."""
    export_every_steps: Annotated[NonNegativeInt, Foreign("save_hf save_hf_interval save_hf_ckpt")] = 0
    """Export the model as a Hugging Face folder, hf_step_NNNNNN, every n steps. 0 (default): only at the end, as hf."""
    best: Annotated[str | None, OnlyIf(EVALUATED)] = None
    """Evaluation metric that selects the best step, for example val/SET/accuracy. That step's model is exported to
    hf_best/ (with best.json: step and value). Its checkpoint, if any, is kept in addition to the newest ones. Best is
    the largest value (for metrics ending with /loss the smallest); of equal ones the earliest."""
