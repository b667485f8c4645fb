"""The recipe's schema: every field, its default and its meaning. Frozen, strict about keys, no torch.

What one field can tell is checked here; what several fields, the model folder or the data decide is checked by
`preflight.check`; both end in the same one-page error.
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

from megarl.config.cluster import ClusterConfig
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
    path: str
    """Folder of the Hugging Face model that training starts from: config.json, safetensors, tokenizer. Or its name on
    the Hub, OWNER/NAME, where its cache has it (hf download OWNER/NAME); nothing is downloaded by a run."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and of the matrix products, in the trainer and in the engine alike."""
    override_config: OverrideConfig = Field(default_factory=dict)
    """Fields of config.json with other values, in trainer and engine alike and in the exported model's config.json:
    rope_theta, rope_scaling or rope_parameters, max_position_embeddings, rms_norm_eps, num_experts_per_tok and
    norm_topk_prob, which leave the weights' shapes alone. Of this folder's model; a critic's or reward model's own
    folder has its own."""
    chat_template: str | None = None
    """Chat template instead of the tokenizer's: a Jinja file, or `plain`, which writes the messages' contents alone, as
    base models read them (the end-of-sequence token follows an assistant's). It is exported with the model."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of the chat template's own variables, such as {enable_thinking: false} of Qwen3, wherever it is applied.
    The exported model's template has them as defaults."""

    @property
    def folder(self) -> str:
        """The model's folder: `path`, or its place in the Hub's cache."""
        return found_folder(self.path)


class DataConfig(Section):
    train: TrainingData
    """Training records: {"messages": {...} or [...]} with "gt_answer" (rl, distillation), an assistant's turn (sft; or
    "prompt" and "response"), "chosen" and "rejected" (preference, reward_model), "response" and "label" (kto), or other
    programs' (data.format). A JSON-lines, JSON, CSV, Parquet or Arrow file; a folder of files of one kind; or a data
    set of the Hugging Face Hub, OWNER/NAME or OWNER/NAME/FOLDER, that is in its cache (hf download OWNER/NAME
    --repo-type dataset). SPLIT@ before a folder or name takes the files of one split, such as train@data/gsm8k. Or
    `environment:COUNT` (rl, distillation): so many problems that rollout.environment makes itself, each a function of
    its number."""
    validation: dict[Name, DataSet] = Field(default_factory=dict)
    """Validation sets by name, as data.train; or {path: ..., fields: ...} with format, fields and answer_field of its
    own. Problems, or pairs (preference, reward_model); or `environment:COUNT`, problems of other numbers than those of
    training. Metric: val/NAME/accuracy."""
    validation_conversations: dict[Name, DataSet] = Field(default_factory=dict)
    """Validation sets of conversations (sft) by name, as data.validation. Metric: val/NAME/loss, nats a token."""
    ptx: OptionalDataSet = None
    """Conversations for the supervised term of PPO-ptx (algorithm.ptx_coefficient), as a set of data.validation."""
    format: Format | None = None
    """Whose names the fields of records have (megarl.data.formats); left out: as recognised in the first record of each
    source, which a start tells. All fields are in `record`, which reward functions get."""
    fields: dict[Role, str] = Field(default_factory=dict)
    """Names of your own for fields of the records, such as {prompt: question, answer: solution}; dots reach into
    objects. `input`: a text that is added to that of the prompt, an empty line between (alpaca). They hold for all sets
    that do not name their own."""
    answer_field: str | None = None
    """Field with the gold answer, another way to write fields.answer: text, a number, an object or a list; dots reach
    into objects. Left out: the format's, gt_answer in megarl's own."""
    system_prompt: str | None = None
    """System message put before each conversation that has none; `default`: that of the first of reward.functions whose
    format needs one (boxed, think_answer_tags, code); `none` or left out: no message."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum length of a prompt in tokens, chat template included. Prompts are never cut: see data.overlong."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """A prompt of more than data.max_prompt_tokens, or a conversation or pair that does not fit in
    trainer.max_tokens_per_microbatch: an error that names its line (refuse), or left out before the run, which a start
    tells and data/dropped counts (drop)."""
    streaming: bool = False
    """Keep training records on disk, for data that do not fit in memory: they are read and checked once before the
    start, copied into an unnamed file of the run's folder, and made into prompts or sequences when they are drawn.
    Order, shuffling, curricula and resume are the same."""
    shuffle: bool = True
    """Shuffle the records anew each epoch, by the run's seed."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which problems are drawn more often (rl, distillation)."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        refuse_two_answers(self.fields, self.answer_field)
        return self


class TrainConfig(Section):
    steps: NonNegativeInt = 100
    """Number of steps: rollouts in `rl` and `distillation`, optimizer updates in other loops; 0: only evaluate the
    validation sets."""
    epochs: PositiveFloat | None = None
    """Passes over the training data, instead of `steps`: their number is that of the records times this over
    prompts_per_step, rounded up. Dynamic sampling draws further prompts."""
    prompts_per_step: PositiveInt = 32
    """Batch size of a step: prompts in rl and distillation, conversations in sft, pairs in preference and
    reward_model."""
    samples_per_prompt: PositiveInt = 8
    """Group size: completions per prompt (rl, distillation)."""
    updates_per_step: PositiveInt = 1
    """Minibatches, one optimizer update each, that the samples of an rl step are split into."""
    epochs_per_step: PositiveInt = 1
    """Epochs over the samples of an rl step, each of `updates_per_step` minibatches, shuffled from the second epoch on.
    Those of the critic: `critic.updates_per_step`."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps whose time is recorded, by the spans of driver and ranks, in the run's profiles/step_NNNNNN.json: a Chrome
    trace, which ui.perfetto.dev opens. Under weights.overlap such a step begins once all weights have arrived."""
    max_logprob_gap: PositiveFloat | None = None
    """Largest mean distance of the trainer's log-probs from the engine's in nats (logprob_gap/mean) that the policy is
    updated with (rl, distillation). Beyond it the step's further updates are left out, all of them where the gap is
    known before (train/gap_exceeded); default: no limit."""
    on_logprob_gap: Literal["stop", "skip"] = "stop"
    """After a step whose gap was too large: save and end the run with exit code 70, or go on with the next step."""
    on_unhealthy: Literal["warn", "stop"] = "warn"
    """When a rule of `health` is broken for the first time: warn, or warn, save a checkpoint and end the run with exit
    code 79."""

    @property
    def num_updates(self) -> int:
        """The policy's optimizer updates in one rl step."""
        return self.epochs_per_step * self.updates_per_step


class EvaluationConfig(Section):
    every_steps: NonNegativeInt = 0
    """Evaluate the validation sets every so many steps, besides before the first and after the last; 0: only those."""
    at_start: bool = True
    """Evaluate before the first step. A run of no steps does in any case."""
    max_problems: PositiveInt | None = None
    """Evaluate only the first so many records of each set; default: all."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Attempts at each problem, n. Accuracy is their mean, avg@n."""
    k: tuple[PositiveInt, ...] = ()
    """Numbers of attempts that pass@k and majority@k are estimated for (val/SET/pass_at_4, majority_at_4), without bias
    from all sets of k of the n; default: n, where there are several. A majority is that of the final answers, where a
    reward function reads one (boxed, think_answer_tags, gsm8k, math_competition, multiple_choice, reasoning_gym)."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Sampling parameters of evaluation."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of attempts that pass@k is estimated for."""
        return self.k or ((self.samples_per_prompt,) if self.samples_per_prompt > 1 else ())


class WeightsConfig(Section):
    bucket_mib: PositiveInt = 256
    """Size of a reshard bucket in MiB; at most two are in memory."""
    overlap: bool = False
    """Send the weights from a copy while the trainer goes on with the next step, where engines sample ahead (placement
    separate, max_staleness above 0; else the next step needs them first): the trainer waits for the copy alone, and
    before the next reshard for what is still under way. Engines pause as ever. The copy takes as much memory as the
    weights of a trainer's rank (`megarl plan`). The trainer waits as ever before an evaluation, after the last step and
    where a replica has come back. Metrics: time/reshard_hidden_seconds, time/reshard_waited_seconds."""
    verify_every: NonNegativeInt = 50
    """Compare the engine's weights with the trainer's before training and after each so many steps' reshard: checksums
    of the live parameters, or log-probs of a prompt where the engine converts its weights. 0: only before training."""
    probe_tolerance: PositiveFloat | None = None
    """Largest mean distance of these log-probs in nats (reshard/probe_gap); left out, 0.001 in float32 and 0.1 in
    bfloat16. An engine that quantizes its weights may need more."""


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = 0
    """Save a checkpoint every so many steps and after the last, for `megarl train --resume`; 0: never."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep, the newest; older ones are removed once a newer one is complete."""
    asynchronous: bool = True
    """Write checkpoints while training goes on, from a copy in host memory."""
    export_every_steps: NonNegativeInt = 0
    """Export the model as a Hugging Face folder hf_step_NNNNNN every so many steps; 0: only at the end."""
    best: str | None = None
    """Metric of an evaluation, such as val/SET/accuracy or val/SET/pass_at_4: the model of the evaluated step at which
    it was best is kept in hf_best/, with step and value in its best.json, and the checkpoint of that step, if there is
    one, beyond `keep`. The largest value is best, of a metric that ends with /loss the smallest; of equal ones the
    first; of the trained steps, not of the beginning."""


class Recipe(Section):
    """One run."""

    name: Name
    """Name of the run and of its folder."""
    loop: Literal["rl", "sft", "preference", "reward_model", "distillation"]
    """Training loop: reinforcement learning, supervised fine-tuning, preference optimization (DPO and the like),
    reward model training, or distillation of a teacher on what the policy samples."""
    seed: NonNegativeInt = 0
    """Random seed of data order, sampling and initialisation."""
    runs_folder: str = "runs"
    """Parent folder of run folders; paths are relative to the current folder."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics and samples go beside metrics.jsonl and samples/ of the run folder: names of
    `tracking.trackers.TRACKERS`, or package.module:Class of your own."""
    samples_every_steps: PositiveInt = 1
    """Write prompts, completions and rewards to samples/ every so many steps (rl, distillation)."""
    samples_with_tokens: Annotated[int, Field(ge=0, le=64)] = 4
    """Number of these steps' samples that are written token by token to tokens/ too, those of the highest and of the
    lowest advantages: log-probs of engine and trainer, advantages, weight versions, for `megarl report` (rl,
    distillation of sampled tokens). Where the step needs no log-probs of the trainer before its update, this is a
    forward pass of these samples; 0: none."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """The data."""
    mixture: dict[Name, SourceConfig] = Field(default_factory=dict)
    """Several sources of problems in one run, by name (rl, distillation): each has a `weight` and what differs for it
    from data, rollout, reward, distillation and evaluation, in sections of these names. Groups never cross sources.
    Metrics of each: environment/NAME/, val/SET/."""
    cluster: ClusterConfig = ClusterConfig()
    """Nodes, ranks and how they are started."""
    trainer: TrainerConfig = TrainerConfig()
    """Megatron: parallel sizes and memory."""
    lora: LoraConfig = LoraConfig()
    """LoRA adapters of the policy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""
    rollout: RolloutConfig = RolloutConfig()
    """vLLM: parallel size and sampling."""
    reward: RewardConfig = RewardConfig()
    """Reward functions and reward model."""
    sandbox: SandboxConfig = SandboxConfig()
    """Programs of the policy: where they run, and their limits (reward code, environment python)."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage estimator, policy loss, KL and their settings (rl, distillation)."""
    critic: CriticConfig = CriticConfig()
    """The critic (rl with advantage gae)."""
    preference: PreferenceConfig = PreferenceConfig()
    """Loss (preference, reward_model)."""
    distillation: DistillationConfig = DistillationConfig()
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
    """Thresholds of the rules that warn of a run which cannot learn (train.on_unhealthy)."""

    _references: dict[Place, str] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Checked with its sources, and with the preset's share of the longest completion in tokens."""
        filled = with_first_train(given)
        made = validate(filled)
        if filled is not given:
            made.data.model_fields_set.discard("train")
        check_sources(made)
        return made.with_overlong_buffer()

    def with_overlong_buffer(self) -> Self:
        """The recipe with the preset's share of its longest completion in tokens, where it has a share."""
        algorithm = self.algorithm
        parts = OVERLONG_PARTS.get(algorithm.preset or "")
        if parts is None or "overlong_buffer" in algorithm.model_fields_set:
            return self
        resolved = algorithm.model_copy(
            update={"overlong_buffer": max(1, self.rollout.sampling.max_new_tokens // parts)}
        )
        resolved.model_fields_set.discard("overlong_buffer")
        return self.model_copy(update={"algorithm": resolved})

    @property
    def references(self) -> Mapping[Place, str]:
        """The text of each value that was read from the environment, such as `${oc.env:HF_TOKEN}`."""
        return self._references

    def with_references(self, references: Mapping[Place, str]) -> Self:
        """The recipe, which is to be written with these texts in place of what they were read as."""
        copy = self.model_copy()
        copy._references = dict(references)
        return copy

    @property
    def notices(self) -> tuple[str, ...]:
        """A line for each reason for which values of the file were dropped when the recipe was read."""
        return self._notices

    def with_notices(self, notices: Sequence[str]) -> Self:
        """The recipe, with these lines about how it was read."""
        copy = self.model_copy()
        copy._notices = tuple(notices)
        return copy

    def override_of(self, folder: str) -> Mapping[str, Any]:
        """`model.override_config` where a folder is the model's; nothing for a model of another folder."""
        return self.model.override_config if folder == self.model.folder else {}

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the model that training starts from."""
        if self.loop == "rl":
            return self.algorithm.kl_coefficient > 0
        return self.loop == "preference" and self.preference.loss in ("dpo", "ipo", "kto")

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.loop == "rl" and self.algorithm.advantage == "gae"

    @property
    def further_models(self) -> dict[str, str]:
        """Folders of the models beside the policy's, by the fields that name them; a run of no steps has no teacher."""
        folders = {
            "critic.path": self.critic.path if self.has_critic else None,
            "reward.model": self.reward.model if self.loop == "rl" else None,
        }
        if self.loop == "distillation" and self.train.steps:
            folders |= {s.place("distillation.teacher"): s.recipe.distillation.teacher for s in self.sources}
        return {field: found_folder(folder) for field, folder in folders.items() if folder}

    @property
    def teachers(self) -> dict[str, str]:
        """Folders of the teachers, each once, by the names that the ranks have for them: teacher0 and so on."""
        found = (folder for field, folder in self.further_models.items() if field.endswith("distillation.teacher"))
        return {f"teacher{number}": folder for number, folder in enumerate(dict.fromkeys(found))}

    @property
    def teacher_of_source(self) -> dict[str, int]:
        """The number of each source's teacher."""
        numbers = {folder: number for number, folder in enumerate(self.teachers.values())}
        given = {source.name: found_folder(source.recipe.distillation.teacher or "") for source in self.sources}
        return {name: numbers[folder] for name, folder in given.items() if folder in numbers}

    @property
    def for_teachers(self) -> Self:
        """The recipe with the teachers' parallel sizes in place of the trainer's."""
        if not (own := self.distillation.sizes):
            return self
        changed = own | {"dp": None, "vpp": 1, "rank_order": "tp-cp-ep-dp-pp"}
        if own["tp"] == 1:
            changed["sequence_parallel"] = None
        trainer = self.trainer.model_copy(update=changed)
        return self.model_copy(update={"trainer": trainer})

    @property
    def is_on_policy(self) -> bool:
        """Whether the policy samples what it is trained on."""
        return self.loop in ("rl", "distillation")

    @property
    def has_advantages(self) -> bool:
        """Whether the loss weighs sampled tokens by advantages."""
        return self.loop == "rl" or (self.loop == "distillation" and self.distillation.loss == "sampled_token")

    @property
    def frozen_steps(self) -> int:
        """First steps in which the policy is not trained."""
        return self.critic.warmup_steps if self.has_critic else 0

    @property
    def sequences_per_example(self) -> int:
        """Sequences that share a row because the loss compares them."""
        return 2 if self.loop == "reward_model" or (self.loop == "preference" and self.preference.loss != "kto") else 1

    @property
    def has_engine(self) -> bool:
        """Whether anything is sampled."""
        return self.is_on_policy or (self.loop == "sft" and bool(self.data.validation))

    @property
    def separate_ranks(self) -> int:
        """Ranks that only sample: `rollout.ranks` of a separate placement, or the engines' nodes' own; else 0."""
        if not self.has_engine or self.rollout.placement != "separate":
            return 0
        engines = self.cluster.groups.engines
        return self.rollout.ranks or (engines.num_ranks if engines is not None else 0)

    @property
    def trainer_ranks(self) -> int:
        """Ranks that train."""
        own = self.cluster.nodes * self.cluster.ranks_per_node
        return own if self.cluster.groups.engines is not None else own - self.separate_ranks

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """Names of all sets that are evaluated."""
        of_sources = [name for source in self.sources for name in source.recipe.data.validation]
        return tuple(dict.fromkeys([*of_sources, *self.data.validation_conversations]))

    def evaluates_at(self, step: int) -> bool:
        """Whether a step ends with an evaluation: every `evaluation.every_steps`, and the last."""
        every = self.evaluation.every_steps
        return bool(self.validation_sets) and (step == self.train.steps or (every > 0 and step % every == 0))

    def overlaps_at(self, step: int) -> bool:
        """Whether a step's reshard goes on beside the next step: `weights.overlap`, where that trains next."""
        return self.weights.overlap and step < self.train.steps and not self.evaluates_at(step)

    def reshards_at(self, step: int) -> bool:
        """Whether a step ends with a reshard: every `rollout.sync_every`, and where it evaluates."""
        return step % self.rollout.sync_every == 0 or self.evaluates_at(step)

    @property
    def sources(self) -> tuple[SourceRecipe, ...]:
        """The sources of problems: those of the mixture, or the recipe's one."""
        return sources(self)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sequence that is sampled: prompt, completions, observations."""
        return max(source.recipe._context_tokens for source in self.sources)

    @property
    def trained_tokens(self) -> int:
        """Tokens of the longest sequence that is trained on."""
        recipes = [source.recipe for source in self.sources]
        return max(recipe.data.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens for recipe in recipes)

    @property
    def longest_trajectory(self) -> int:
        """Tokens that the policy samples at most in an attempt of training, in all its turns together."""
        return max(source.recipe._longest_trajectory for source in self.sources)

    @property
    def _longest_trajectory(self) -> int:
        rollout = self.rollout
        longest = rollout.turns_of_attempt * rollout.sampling.max_new_tokens
        if rollout.turns_of_attempt == 1:
            return longest
        if rollout.history == "append" and rollout.environment != "command":
            # All turns are in one sequence. Rendered histories, and those of programs, are sequences of their own.
            longest = min(longest, self.data.max_prompt_tokens + rollout.sampling.max_new_tokens)
        return min(longest, rollout.budget.sampled_tokens or longest)

    @property
    def _context_tokens(self) -> int:
        longest = max(self.rollout.sampling.max_new_tokens, self.evaluation_sampling.max_new_tokens)
        return self.data.max_prompt_tokens + longest

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """`evaluation.sampling` without its repetition penalty, and from `rollout.sampling` what it leaves out."""
        own = self.evaluation.sampling.model_dump(exclude_none=True, exclude={"repetition_penalty"})
        own["temperature_schedule"] = "constant"
        if self.evaluation.samples_per_prompt == 1:
            own.setdefault("temperature", 0.0)
        return self.rollout.sampling.model_copy(update=own)
