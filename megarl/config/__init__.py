"""Recipe schema: every field, its default and its meaning. Frozen, strict about keys, free of torch.

Checks of a single field are here. Checks of several fields, the model folder or the data are in `preflight.check`. Both
report on the same one-page error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megarl.config.annotations import Decides, Foreign, ForeignValues, OnlyIf
from megarl.config.cluster import ClusterConfig
from megarl.config.conditions import (
    ADVANTAGES,
    DISTILLATION,
    ENGINE,
    EVALUATED,
    GAE,
    ON_POLICY,
    PACED,
    PREFERENCE,
    PTX_COEFFICIENT,
    RL,
    SANDBOX,
    SFT,
    UNPACED,
    given,
    instead_of,
    left_out,
)
from megarl.config.curriculum import CurriculumConfig
from megarl.config.data_sets import DataSet, Format, OptionalDataSet, Role, TrainingData, refuse_two_answers
from megarl.config.distillation import DistillationConfig
from megarl.config.health import HealthConfig
from megarl.config.learning import (
    OVERLONG_PARTS,
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    PreferenceConfig,
)
from megarl.config.mixture import SourceConfig, SourceRecipe, check_sources, sources, with_first_train
from megarl.config.override import override_fault
from megarl.config.rewards import RewardConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.sampling import EvaluationSamplingConfig, SamplingConfig
from megarl.config.sandbox import SandboxConfig
from megarl.config.secrets import Place
from megarl.config.section import Section
from megarl.config.trainer import TrainerConfig
from megarl.files.model_folder import found_folder

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _overrides(given: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if fault := override_fault(given):
        raise PydanticCustomError("override_config", "{fault}", {"fault": fault})
    return given


OverrideConfig = Annotated[dict[str, JsonValue], AfterValidator(_overrides)]


class ModelConfig(Section):
    """Policy model: its folder, type, overrides and chat template."""

    path: Annotated[str, Decides(vllm="model"),
        Foreign("model_name hf_checkpoint actor_rollout_ref.model.path ref_load", example="Qwen/Qwen3-8B", short="m",
            ColossalChat="--pretrain", verl="actor_rollout_ref.model.path", TRL="model_name_or_path")]  # fmt: skip
    """Folder of the initial Hugging Face model: config.json, safetensors, tokenizer. Or its name on the Hub,
    OWNER/NAME, if its cache has it (hf download OWNER/NAME). A run downloads nothing."""
    dtype: Annotated[Literal["float32", "bfloat16"], Decides(vllm="dtype", megatron="params_dtype pipeline_dtype bf16"),
        Foreign("torch_dtype param_dtype precision policy.dtype", remark="no fp16", ColossalChat="--mixed_precision",
            TRL="bf16"),
        ForeignValues(bfloat16="bf16 fp16 float16 half", float32="fp32 float")] = "bfloat16"  # fmt: skip
    """Type of weights and matrix products, in trainer and engine. Default: bfloat16."""
    override_config: Annotated[OverrideConfig, Decides(vllm="hf_overrides"),
        Foreign("override_config hf_config_overrides hf_overrides rope_scaling rope_theta",
            note="fields without influence on the weights' shapes",
            example="model.override_config.rope_theta=5000000.0", verl="actor_rollout_ref.model.override_config",
            slime="--rotary-base")] = Field(default_factory=dict)  # fmt: skip
    """Changed fields of config.json, in trainer, engine and exported model: rope_theta, rope_scaling or
    rope_parameters, max_position_embeddings, rms_norm_eps, num_experts_per_tok, norm_topk_prob. Weight shapes do not
    depend on them. Applies to this folder only; a critic's or reward model's folder has its own."""
    chat_template: Annotated[str | None,
        Foreign("return_raw_chat", note="plain writes only the contents", example="plain",
            slime="--apply-chat-template"),
        Foreign("custom_chat_template", example="template.jinja", ColossalChat="--conversation_template_config",
            TRL="chat_template_path")] = None  # fmt: skip
    """Chat template replacing the tokenizer's: a Jinja file; or `plain`, the messages' contents alone, as base models
    read them (with the end-of-sequence token after an assistant's). Exported with the model."""
    chat_template_kwargs: Annotated[dict[str, JsonValue],
        Foreign("apply_chat_template_kwargs", example="model.chat_template_kwargs.enable_thinking=false",
            verl="data.apply_chat_template_kwargs")] = Field(default_factory=dict)  # fmt: skip
    """Values of the chat template's own variables, for example {enable_thinking: false} for Qwen3, wherever it is
    applied. The exported model's template has them as defaults."""

    @property
    def folder(self) -> str:
        """Return the model's folder: `path`, or its place in the Hub's cache."""
        return found_folder(self.path)


class DataConfig(Section):
    # Records by loop: {"messages": {...} or [...]} with "gt_answer" (rl, distillation); with an assistant's turn, or
    # "prompt" and "response" (sft); "chosen" and "rejected" (preference, reward_model); "response" and "label" (kto).
    # data.format has the formats of other programs. SPLIT@ stands before a folder or name: train@data/gsm8k takes the
    # files of one split. `environment:COUNT` is for rl and distillation. Each such problem is a function of its number.
    """Training and validation data, their format, order and limits."""

    # "messages" is {...} or [...]. sft also takes "prompt" and "response", kto takes "response" and "label". A Hub data
    # set may be OWNER/NAME/FOLDER and comes from `hf download OWNER/NAME --repo-type dataset`. Example of a split:
    # train@data/gsm8k. `environment:COUNT` (rl, distillation): n problems made by rollout.environment, each a function
    # of its number.
    train: Annotated[TrainingData,
        Foreign("train_files dataset_name train_data_path train_data.path train_data dataset prompt_dataset",
            "data.path", example="data.jsonl", short="d", verl="data.train_files", slime="--prompt-data")]  # fmt: skip
    """Training data: a JSON-lines, JSON, CSV, Parquet or Arrow file, a folder of one kind, or OWNER/NAME in the Hub's
    cache; SPLIT@ before it takes one split. Or `environment:COUNT`. Records: "messages" with "gt_answer" (rl,
    distillation) or an assistant's turn (sft); "chosen" and "rejected" (preference, reward_model); or data.format's."""
    validation: Annotated[dict[Name, DataSet],
        Foreign("val_files eval_prompt_data eval_dataset val_data_path test_files test_data_path test_data",
            note="sources by name", example="data.validation.test=test@openai/gsm8k/main", short="ed",
            RL2="test_data.path", verl="data.val_files")] = Field(default_factory=dict)  # fmt: skip
    """Validation sets by name: paths as in data.train, or {path: ..., fields: ...} with own format, fields,
    answer_field. Problems, or pairs (preference, reward_model); `environment:COUNT` makes problems not used in
    training. Metric: val/NAME/accuracy."""
    validation_conversations: Annotated[dict[Name, DataSet], OnlyIf(SFT)] = Field(default_factory=dict)
    """Validation sets of conversations (sft) by name, written as in data.validation. Metric: val/NAME/loss, in nats per
    token."""
    ptx: Annotated[OptionalDataSet, OnlyIf(RL, PTX_COEFFICIENT),
        Foreign("pretrain_data", example="data.ptx=talk.jsonl algorithm.ptx_coefficient=0.1",
            ColossalChat="--ptx_dataset")] = None  # fmt: skip
    """Conversations for the supervised term of PPO-ptx (algorithm.ptx_coefficient), written as in data.validation."""
    format: Format | None = None
    """Training program for which the data was written. Its names of record fields are used (megarl.data.formats).
    Default: recognised from each source's first record and reported at the start. Reward functions get all fields in
    `record`."""
    fields: Annotated[dict[Role, str],
        Foreign("prompt_key", note="{prompt: NAME}", example="data.fields.prompt=prompt", verl="data.prompt_key",
            slime="--input-key")] = Field(default_factory=dict)  # fmt: skip
    """Your names of record fields, for example {prompt: question, answer: solution}; dots reach into objects. `input`
    is a text appended to the prompt after an empty line (alpaca). Used for every set without its own names."""
    answer_field: Annotated[str | None, OnlyIf(*ENGINE),
        Foreign("ground_truth_key", example="label", slime="--label-key")] = None  # fmt: skip
    """Field of the gold answer, short for fields.answer: text, a number, an object or a list; dots reach into objects.
    Default: the format's field, gt_answer in megarl's own."""
    system_prompt: Annotated[str | None,
        Foreign(remark="default: the reward's own; or a text", example="default", short="s",
            ColossalRL="--system-prompt")] = None  # fmt: skip
    """System message for conversations without one. `default`: the message needed by the first of reward.functions with
    a format (boxed, think_answer_tags, code). `none` (or no value): no message."""
    max_prompt_tokens: Annotated[PositiveInt, OnlyIf(*ENGINE), Decides(vllm="max_model_len"),
        Foreign("max_prompt_length prompt_max_len rollout_max_prompt_len max_input_seq_length", example="512",
            verl="data.max_prompt_length"),
        Foreign(remark="a longer prompt is refused or dropped, never cut", example="512", short="mpt",
            ColossalRL="--max-prompt-tokens")] = 1024  # fmt: skip
    """Limit of prompt tokens, chat template included. Prompts are never cut: see data.overlong."""
    overlong: Annotated[Literal["refuse", "drop"],
        Foreign("filter_overlong_prompts data.truncation", note="prompts are never cut", example="drop",
            verl="data.filter_overlong_prompts")] = "refuse"  # fmt: skip
    """Treatment of a prompt above data.max_prompt_tokens, or a conversation or pair above
    trainer.max_tokens_per_microbatch. refuse (default): an error naming its line. drop: left out before the run,
    reported at the start. Metric: data/dropped."""
    streaming: Annotated[bool, Foreign("dataset_streaming use_streaming_dataset")] = False
    """Keep training records on disk, for data larger than memory. They are read and checked once at the start, copied
    to an unnamed file in the run's folder, and tokenised when drawn. Order, shuffling, curricula and resume do not
    change."""
    shuffle: Annotated[bool,
        Foreign("shuffle_dataset", slime="--rollout-shuffle"),
        Foreign(example="false", verl="data.shuffle")] = True  # fmt: skip
    """Shuffle the records again in each epoch, by the run's seed. Default: true."""
    curriculum: Annotated[CurriculumConfig, OnlyIf(ON_POLICY)] = CurriculumConfig()
    """Choice of problems by their solve rates (rl, distillation)."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        refuse_two_answers(self.fields, self.answer_field)
        return self


class TrainConfig(Section):
    """Batch sizes, length of the run, and its stop conditions."""

    steps: Annotated[NonNegativeInt, OnlyIf(instead_of("train.epochs")),
        Foreign("total_training_steps max_num_steps max_train_steps total_steps", example="200",
            verl="trainer.total_training_steps", slime="--num-rollout", TRL="max_steps"),
        Foreign("eval_only", note="0; or: megarl eval MODEL RECIPE")] = 100  # fmt: skip
    """Number of steps: rollouts in `rl` and `distillation`, optimizer updates in other loops. 0: only evaluate the
    validation sets."""
    epochs: Annotated[PositiveFloat | None, OnlyIf(left_out("mixture")),
        Foreign("total_epochs max_num_epochs num_episodes num_epochs n_epochs num_epoch", example="2", short="e",
            RL2="trainer.n_epochs", verl="trainer.total_epochs", TRL="num_train_epochs")] = None  # fmt: skip
    """Passes over the training data, instead of `steps`: steps = number of records * epochs / prompts_per_step, rounded
    up. Dynamic sampling draws further prompts."""
    prompts_per_step: Annotated[PositiveInt,
        Foreign("num_prompts_per_step train.batch_size batch_size prompts_per_rollout consumer_batch_size",
            example="64", RL2="data.prompts_per_rollout", verl="data.train_batch_size", slime="--rollout-batch-size",
            AReaL="rollout.consumer_batch_size"),
        Foreign(note="over all inferencers: ibs * num_inferencer", example="128", short="ibs",
            ColossalRL="--inference-batch-size"),
        Foreign(note="verl: prompts of a step; OpenRLHF: samples of an update; ColossalRL: updates_per_step is ibs * "
            "num_inferencer / (tbs * dp)", example="train.updates_per_step=2", also="train.updates_per_step",
            short="tbs", ColossalRL="--train-batch-size"),
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
    """Number of minibatches in an rl step. Each is one optimizer update."""
    epochs_per_step: Annotated[PositiveInt, OnlyIf(ON_POLICY),
        Foreign(remark="passes over the samples of a step", example="5", ColossalChat="--num_update_steps"),
        Foreign("ppo_epochs num_ppo_epochs", verl="actor_rollout_ref.actor.ppo_epochs",
            TRL="num_iterations")] = 1  # fmt: skip
    """Epochs over the samples of an rl step, each of `updates_per_step` minibatches; shuffled from the second epoch on.
    For the critic see `critic.updates_per_step`."""
    profile_steps: Annotated[tuple[PositiveInt, ...],
        Foreign("global_profiler.steps profile_steps profile_step_start",
            remark="a Chrome trace; no rollout is made longer for it", example="[2]",
            ColossalRL="--enable_profiling")] = ()  # fmt: skip
    """Steps to profile: spans of driver and ranks are written to the run's profiles/step_NNNNNN.json, a Chrome trace
    (open with ui.perfetto.dev). With weights.overlap such a step begins only after all weights have arrived."""
    max_logprob_gap: Annotated[PositiveFloat | None, OnlyIf(ON_POLICY, UNPACED)] = None
    """Limit in nats of the mean distance between trainer and engine log-probs (logprob_gap/mean) for updates of the
    policy (rl, distillation). Above it the step's further updates are skipped, all of them if it is known before the
    first. Default: none. Metric: train/gap_exceeded."""
    on_logprob_gap: Annotated[Literal["stop", "skip"], OnlyIf(ON_POLICY, UNPACED, given("train.max_logprob_gap"))] = (
        "stop"
    )
    """Action after a step above max_logprob_gap. stop (default): save and end the run with exit code 70. skip: continue
    with the next step."""
    on_unhealthy: Literal["warn", "stop"] = "warn"
    """Action when a rule of `health` is first broken. warn (default): only warn. stop: warn, save a checkpoint and end
    the run with exit code 79."""

    @property
    def num_updates(self) -> int:
        """Return the number of the policy's optimizer updates in one rl step."""
        return self.epochs_per_step * self.updates_per_step


class EvaluationConfig(Section):
    """When and how the validation sets are evaluated."""

    every_steps: Annotated[NonNegativeInt,
        Foreign("test_freq val_period", example="100", short="ei", RL2="trainer.test_freq", verl="trainer.test_freq",
            slime="--eval-interval", TRL="eval_steps")] = 0  # fmt: skip
    """Evaluate the validation sets every n steps, in addition to before the first and after the last. 0 (default): only
    before the first and after the last."""
    at_start: Annotated[bool,
        Foreign("val_before_train val_at_start", example="false", verl="trainer.val_before_train",
            TRL="eval_on_start")] = True  # fmt: skip
    """Evaluate before the first step. A run of 0 steps always does."""
    max_problems: Annotated[PositiveInt | None, Foreign("max_val_samples")] = None
    """Evaluate only the first n records of each set. Default: all."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024), OnlyIf(*ENGINE),
        Foreign("val_kwargs.n n_samples_per_eval_prompt eval_n_samples_per_prompt",
            remark="metrics pass_at_4, majority_at_4", example="4",
            verl="actor_rollout_ref.rollout.val_kwargs.n")] = 1  # fmt: skip
    """Number n of attempts at each problem. Accuracy is their mean, avg@n."""
    k: Annotated[tuple[PositiveInt, ...], OnlyIf(*ENGINE)] = ()
    """Values of k for pass@k and majority@k, estimated without bias from the n attempts. Default: n, if above 1. A
    majority needs a reward function reading final answers (boxed, think_answer_tags, gsm8k, math_competition,
    multiple_choice, reasoning_gym). Metrics: val/SET/pass_at_4, majority_at_4."""
    sampling: Annotated[EvaluationSamplingConfig, OnlyIf(*ENGINE),
        Foreign("test_sampling_params test_sampling_params.temperature test_sampling_params.max_new_tokens",
            "test_sampling_params.top_p test_sampling_params.top_k", example="evaluation.sampling.temperature=0",
            RL2="rollout.test_sampling_params.temperature"),
        Foreign("val_kwargs eval_temperature val_kwargs.temperature", example="evaluation.sampling.temperature=0.6",
            verl="actor_rollout_ref.rollout.val_kwargs.temperature")] = EvaluationSamplingConfig()  # fmt: skip
    """Sampling parameters of evaluation."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Return the values of k for pass@k."""
        return self.k or ((self.samples_per_prompt,) if self.samples_per_prompt > 1 else ())


class WeightsConfig(Section):
    """Reshard: the copy of weights from the trainer into the engines."""

    bucket_mib: PositiveInt = 256
    """Size of a reshard bucket in MiB. At most two buckets are in memory."""
    # With max_staleness 0 the next step needs the new weights first. Engines pause for the whole transfer in any case.
    # The trainer waits for a running transfer before the next reshard, before an evaluation, after the last step, and
    # after a replica came back.
    overlap: Annotated[bool, OnlyIf(RL, PACED)] = False
    """Send weights from a copy during the next step, so the trainer waits only for the copy (placement separate,
    max_staleness above 0). Needs memory for one more copy of a trainer rank's weights (see `megarl plan`). Default:
    false. Metrics: time/reshard_hidden_seconds, time/reshard_waited_seconds."""
    verify_every: Annotated[NonNegativeInt, OnlyIf(*ENGINE)] = 50
    """Compare engine and trainer weights before training and after the reshard of every n-th step: by checksums of live
    parameters, or by log-probs of a prompt if the engine converts its weights. 0: only before training."""
    probe_tolerance: Annotated[PositiveFloat | None, OnlyIf(*ENGINE)] = None
    """Limit of the mean distance of these log-probs in nats (reshard/probe_gap). Default: 0.001 in float32, 0.1 in
    bfloat16. An engine with quantised weights may need more."""


class CheckpointConfig(Section):
    """Checkpoints and exports during a run."""

    every_steps: Annotated[NonNegativeInt,
        Foreign("save_freq save_period", example="100", short="si", ColossalChat="--save_interval",
            RL2="actor.save_freq", verl="trainer.save_freq", slime="--save-interval",
            TRL="save_steps")] = 0  # fmt: skip
    """Save a checkpoint every n steps and after the last, for `megarl train --resume`. 0 (default): never."""
    keep: Annotated[PositiveInt, Foreign("max_actor_ckpt_to_keep save_total_limit keep_top_k max_ckpt_num")] = 2
    """Number of newest checkpoints to retain. An older one is removed after a newer one is complete."""
    asynchronous: Annotated[bool, Foreign("async_save")] = True
    """Write checkpoints during training, from a copy in host memory. Default: true."""
    export_every_steps: Annotated[NonNegativeInt, Foreign("save_hf save_hf_interval save_hf_ckpt")] = 0
    """Export the model as a Hugging Face folder hf_step_NNNNNN every n steps. 0 (default): only at the end."""
    best: Annotated[str | None, OnlyIf(EVALUATED)] = None
    """Evaluation metric, for example val/SET/accuracy or val/SET/pass_at_4. The best step's model is exported to
    hf_best/ (step and value in best.json), and its checkpoint, if any, is retained in addition to `keep`. Best is the
    largest value (smallest for names ending with /loss), the first of equal ones, among trained steps."""


class Recipe(Section):
    """Recipe of one run: all sections, and values derived from several of them."""

    name: Annotated[Name,
        Foreign("experiment_name run_name exp_name"),
        Foreign("project_name wandb_project",
            note="of the run and its folder; the variable WANDB_PROJECT names a project", example="grpo-math",
            short="p", ColossalRL="--project")]  # fmt: skip
    """Name of the run and of its folder."""
    loop: Annotated[Literal["rl", "sft", "preference", "reward_model", "distillation"],
        Foreign(note="distillation", example="loop=distillation distillation.teacher=models/Qwen3-32B",
            verl="distillation.enabled", slime="--use-opd"),
        ForeignValues(rl="grpo ppo dapo rlhf", preference="dpo kto simpo orpo", reward_model="rm",
            distillation="opd gkd")]  # fmt: skip
    """Training loop: rl (reinforcement learning), sft (supervised fine-tuning), preference (DPO and similar),
    reward_model, or distillation (of a teacher, on samples of the policy)."""
    seed: Annotated[NonNegativeInt, Decides(vllm="seed")] = 0
    """Random seed of data order, sampling and initialisation."""
    runs_folder: Annotated[str,
        Foreign("default_local_dir checkpoint_dir ckpt_path", short="sd", ColossalRL="--save-dir",
            ColossalChat="--save_path", TRL="output_dir")] = "runs"  # fmt: skip
    """Parent folder of run folders. Paths are relative to the current folder."""
    trackers: Annotated[tuple[str, ...],
        Foreign("logger use_wandb disable_wandb use_tensorboard",
            note="tensorboard, wandb, mlflow; metrics.jsonl is always written", ColossalChat="--log_dir",
            RL2="trainer.disable_wandb", verl="trainer.logger", TRL="report_to")] = ("tensorboard",)  # fmt: skip
    """Destinations of metrics and samples, in addition to metrics.jsonl and samples/ in the run folder: names of
    `tracking.trackers.TRACKERS` (default: tensorboard), or your own package.module:Class."""
    samples_every_steps: Annotated[PositiveInt, OnlyIf(ON_POLICY),
        Foreign("log_completions rollout_data_dir log_val_generations", remark="in the run's folder: samples/",
            example="20", short="rsd", ColossalRL="--rollout-save-dir")] = 1  # fmt: skip
    """Write prompts, completions and rewards to samples/ every n steps (rl, distillation)."""
    # The forward pass is needed only where the step computes no trainer log-probs before its update.
    samples_with_tokens: Annotated[int, Field(ge=0, le=64), OnlyIf(*ADVANTAGES)] = 4
    """Number of samples written token by token to tokens/ for `megarl report`, in each step of samples_every_steps: the
    highest and lowest advantages, with log-probs of engine and trainer and weight versions (rl, distillation of sampled
    tokens). May cost a forward pass of these samples. 0: none."""
    model: ModelConfig
    """Policy model."""
    data: DataConfig
    """Training and validation data."""
    mixture: Annotated[dict[Name, SourceConfig], OnlyIf(ON_POLICY),
        Foreign("teacher_key teacher_tag_key", note="each source names its teacher",
            example="loop=distillation mixture.math.distillation.teacher=models/math "
            "mixture.code.distillation.teacher=models/code",
            verl="distillation.teacher_key")] = Field(default_factory=dict)  # fmt: skip
    """Several sources of problems in one run, by name (rl, distillation). Each has a `weight` and its own values for
    data, rollout, reward, distillation and evaluation, in sections of these names. Groups never mix sources. Metrics
    per source: environment/NAME/, val/SET/."""
    cluster: ClusterConfig = ClusterConfig()
    """Nodes, ranks and their launcher."""
    trainer: TrainerConfig = TrainerConfig()
    """Megatron: parallel sizes and memory."""
    lora: LoraConfig = LoraConfig()
    """LoRA adapters of the policy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""
    rollout: Annotated[RolloutConfig, OnlyIf(*ENGINE)] = RolloutConfig()
    """vLLM engines: parallel size, sampling, environments, asynchrony."""
    reward: Annotated[RewardConfig, OnlyIf(*ENGINE)] = RewardConfig()
    """Reward functions and reward model."""
    sandbox: Annotated[SandboxConfig, OnlyIf(*ENGINE, SANDBOX)] = SandboxConfig()
    """Isolated execution of the policy's programs (reward code, environment python), and its limits."""
    algorithm: Annotated[AlgorithmConfig, OnlyIf(RL)] = AlgorithmConfig()
    """Advantage estimator, policy loss, KL and their settings (rl, distillation)."""
    critic: Annotated[CriticConfig, OnlyIf(*GAE)] = CriticConfig()
    """Critic (rl with advantage gae)."""
    preference: Annotated[PreferenceConfig, OnlyIf(PREFERENCE)] = PreferenceConfig()
    """Loss on pairs or judged answers (preference, reward_model)."""
    distillation: Annotated[DistillationConfig, OnlyIf(DISTILLATION)] = DistillationConfig()
    """Teachers and loss (distillation)."""
    train: TrainConfig = TrainConfig()
    """Batch sizes and length of the run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on the validation sets."""
    weights: WeightsConfig = WeightsConfig()
    """Reshard: weights from the trainer into the engines."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and exports during a run."""
    health: HealthConfig = HealthConfig()
    """Health checks, warning when a run is not learning (train.on_unhealthy): disabled checks and thresholds."""

    # Private attributes, not fields: they are never validated or written as part of the recipe.
    _references: dict[Place, str] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the recipe with its sources, then set the preset's overlong_buffer."""
        filled = with_first_train(given)
        made = validate(filled)
        if filled is not given:
            # The user gave it to a source only. As a given field it would be reported as overridden by all sources.
            made.data.model_fields_set.discard("train")
        check_sources(made)
        return made.with_overlong_buffer()

    def with_overlong_buffer(self) -> Self:
        """Return the recipe with the preset's overlong_buffer (a share of max_new_tokens), if the preset has one."""
        algorithm = self.algorithm
        parts = OVERLONG_PARTS.get(algorithm.preset or "")
        if parts is None or "overlong_buffer" in algorithm.model_fields_set:
            return self
        resolved = algorithm.model_copy(
            update={"overlong_buffer": max(1, self.rollout.sampling.max_new_tokens // parts)}
        )
        # The value comes from the preset. A source with another max_new_tokens computes its own.
        resolved.model_fields_set.discard("overlong_buffer")
        return self.model_copy(update={"algorithm": resolved})

    @property
    def references(self) -> Mapping[Place, str]:
        """Return the text of each value read from the environment, for example `${oc.env:HF_TOKEN}`."""
        return self._references

    def with_references(self, references: Mapping[Place, str]) -> Self:
        """Return a copy of the recipe. Writing it shows these texts instead of the values read from them."""
        copy = self.model_copy()
        copy._references = dict(references)
        return copy

    @property
    def notices(self) -> tuple[str, ...]:
        """Return one line per reason for dropping values of the file while reading the recipe."""
        return self._notices

    def with_notices(self, notices: Sequence[str]) -> Self:
        """Return a copy of the recipe with these lines about its reading."""
        copy = self.model_copy()
        copy._notices = tuple(notices)
        return copy

    def override_of(self, folder: str) -> Mapping[str, Any]:
        """Return `model.override_config` if `folder` is the policy's, else nothing."""
        return self.model.override_config if folder == self.model.folder else {}

    @property
    def has_reference(self) -> bool:
        """Return whether the loss compares with the initial model."""
        if self.loop == "rl":
            return self.algorithm.kl_coefficient > 0
        return self.loop == "preference" and self.preference.loss in ("dpo", "ipo", "kto")

    @property
    def has_critic(self) -> bool:
        """Return whether a critic is trained with the policy."""
        return self.loop == "rl" and self.algorithm.advantage == "gae"

    @property
    def further_models(self) -> dict[str, str]:
        """Return the folders of all models except the policy's, by recipe field. A run of 0 steps has no teacher."""
        folders = {
            "critic.path": self.critic.path if self.has_critic else None,
            "reward.model": self.reward.model if self.loop == "rl" else None,
        }
        if self.loop == "distillation" and self.train.steps:
            folders |= {s.place("distillation.teacher"): s.recipe.distillation.teacher for s in self.sources}
        return {field: found_folder(folder) for field, folder in folders.items() if folder}

    @property
    def teachers(self) -> dict[str, str]:
        """Return the distinct teacher folders by their names on the ranks: teacher0, teacher1 and so on."""
        found = (folder for field, folder in self.further_models.items() if field.endswith("distillation.teacher"))
        return {f"teacher{number}": folder for number, folder in enumerate(dict.fromkeys(found))}

    @property
    def teacher_of_source(self) -> dict[str, int]:
        """Return the number of each source's teacher."""
        numbers = {folder: number for number, folder in enumerate(self.teachers.values())}
        given = {source.name: found_folder(source.recipe.distillation.teacher or "") for source in self.sources}
        return {name: numbers[folder] for name, folder in given.items() if folder in numbers}

    # dp follows from the other sizes. Sequence parallelism needs tp > 1, so with tp 1 it returns to its default.
    @property
    def for_teachers(self) -> Self:
        """Return the recipe with the teachers' parallel sizes instead of the trainer's."""
        if not (own := self.distillation.sizes):
            return self
        changed = own | {"dp": None, "vpp": 1, "rank_order": "tp-cp-ep-dp-pp"}
        if own["tp"] == 1:
            changed["sequence_parallel"] = None
        trainer = self.trainer.model_copy(update=changed)
        return self.model_copy(update={"trainer": trainer})

    @property
    def is_on_policy(self) -> bool:
        """Return whether the policy samples its own training data."""
        return self.loop in ("rl", "distillation")

    @property
    def has_advantages(self) -> bool:
        """Return whether the loss weighs sampled tokens by advantages."""
        return self.loop == "rl" or (self.loop == "distillation" and self.distillation.loss == "sampled_token")

    @property
    def frozen_steps(self) -> int:
        """Return the number of first steps without policy updates."""
        return self.critic.warmup_steps if self.has_critic else 0

    @property
    def sequences_per_example(self) -> int:
        """Return how many sequences share a row because the loss compares them."""
        return 2 if self.loop == "reward_model" or (self.loop == "preference" and self.preference.loss != "kto") else 1

    @property
    def has_engine(self) -> bool:
        """Return whether the run samples anything."""
        return self.is_on_policy or (self.loop == "sft" and bool(self.data.validation))

    @property
    def separate_ranks(self) -> int:
        """Return the number of ranks for sampling only: `rollout.ranks`, or all ranks of the engines' nodes. Colocated:
        0."""
        if not self.has_engine or self.rollout.placement != "separate":
            return 0
        engines = self.cluster.groups.engines
        return self.rollout.ranks or (engines.num_ranks if engines is not None else 0)

    @property
    def trainer_ranks(self) -> int:
        """Return the number of training ranks."""
        own = self.cluster.nodes * self.cluster.ranks_per_node
        return own if self.cluster.groups.engines is not None else own - self.separate_ranks

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """Return the names of all evaluated sets."""
        of_sources = [name for source in self.sources for name in source.recipe.data.validation]
        return tuple(dict.fromkeys([*of_sources, *self.data.validation_conversations]))

    def evaluates_at(self, step: int) -> bool:
        """Return whether a step ends with an evaluation: every `evaluation.every_steps` steps, and the last."""
        every = self.evaluation.every_steps
        return bool(self.validation_sets) and (step == self.train.steps or (every > 0 and step % every == 0))

    def overlaps_at(self, step: int) -> bool:
        """Return whether a step's reshard overlaps the next step: with `weights.overlap`, if another step follows
        directly."""
        return self.weights.overlap and step < self.train.steps and not self.evaluates_at(step)

    def reshards_at(self, step: int) -> bool:
        """Return whether a step ends with a reshard: every `rollout.sync_every` steps, and before an evaluation."""
        return step % self.rollout.sync_every == 0 or self.evaluates_at(step)

    @property
    def sources(self) -> tuple[SourceRecipe, ...]:
        """Return the sources of problems: the mixture's, or the recipe as the only one."""
        return sources(self)

    @property
    def context_tokens(self) -> int:
        """Return the tokens of the longest sampled sequence: prompt, completions, observations."""
        return max(source.recipe._context_tokens for source in self.sources)

    @property
    def trained_tokens(self) -> int:
        """Return the tokens of the longest trained sequence."""
        recipes = [source.recipe for source in self.sources]
        return max(recipe.data.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens for recipe in recipes)

    @property
    def longest_trajectory(self) -> int:
        """Return the limit of tokens sampled in one training attempt, in all its turns together."""
        return max(source.recipe._longest_trajectory for source in self.sources)

    @property
    def _longest_trajectory(self) -> int:
        rollout = self.rollout
        longest = rollout.turns_of_attempt * rollout.sampling.max_new_tokens
        if rollout.turns_of_attempt == 1:
            return longest
        if rollout.history == "append" and rollout.environment != "command":
            # All turns are in one sequence, so together they fit in the context. Rendered histories and the calls of
            # a program are separate sequences, each with its own room.
            longest = min(longest, self.data.max_prompt_tokens + rollout.sampling.max_new_tokens)
        return min(longest, rollout.budget.sampled_tokens or longest)

    @property
    def _context_tokens(self) -> int:
        longest = max(self.rollout.sampling.max_new_tokens, self.evaluation_sampling.max_new_tokens)
        return self.data.max_prompt_tokens + longest

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """Return `evaluation.sampling` without its repetition penalty, completed from `rollout.sampling`."""
        own = self.evaluation.sampling.model_dump(exclude_none=True, exclude={"repetition_penalty"})
        own["temperature_schedule"] = "constant"
        if self.evaluation.samples_per_prompt == 1:
            own.setdefault("temperature", 0.0)
        return self.rollout.sampling.model_copy(update=own)
