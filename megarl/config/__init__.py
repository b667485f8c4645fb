"""Recipe schema: every field, its default and its meaning. Frozen, strict about keys, free of torch.

Checks of a single field are here. Checks of several fields, the model folder or the data are in `preflight.check`. Both
report on the same one-page error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    model_validator,
)

from megarl.config.annotations import Decides, Foreign, ForeignValues, OnlyIf
from megarl.config.cluster import ClusterConfig
from megarl.config.conditions import ADVANTAGES, DISTILLATION, ENGINE, GAE, ON_POLICY, PREFERENCE, RL, SANDBOX
from megarl.config.data_sets import DataConfig, Name
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
from megarl.config.policy_model import ModelConfig
from megarl.config.rewards import RewardConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.sampling import SamplingConfig
from megarl.config.sandbox import SandboxConfig
from megarl.config.schedule import CheckpointConfig, EvaluationConfig, TrainConfig, WeightsConfig
from megarl.config.secrets import Place
from megarl.config.section import Section
from megarl.config.trainer import TrainerConfig
from megarl.files.model_folder import found_folder


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
            verl="trainer.logger", TRL="report_to"),
        Foreign(example="[]", RL2="trainer.disable_wandb")] = ("tensorboard",)  # fmt: skip
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
        source_names = [name for source in self.sources for name in source.recipe.data.validation]
        return tuple(dict.fromkeys([*source_names, *self.data.validation_conversations]))

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
