"""Schema of a recipe (a run's YAML file): every field with its type, default and meaning. An unknown key is an error.

Checks of a single field are in this package; checks of several fields, of the model folder or of the data are in
`megarl.preflight`. A user sees the errors of both in one list. The package imports without torch.
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

from megarl.config.annotations import Decides, OnlyIf
from megarl.config.conditions import (
    ADVANTAGES,
    DISTILLATION,
    ENGINE,
    EVALUATED,
    GAE,
    ON_POLICY,
    PREFERENCE,
    RL,
    SANDBOX,
)
from megarl.config.mixture import SourceConfig, SourceRecipe, check_sources, sources, with_train_of_first_source
from megarl.config.secrets import Place
from megarl.config.section import Section
from megarl.config.sections.cluster import ClusterConfig
from megarl.config.sections.data_sets import DataConfig, Name
from megarl.config.sections.distillation import SELF_TEACHERS, DistillationConfig
from megarl.config.sections.health import HealthConfig
from megarl.config.sections.learning import (
    OVERLONG_PARTS,
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    PreferenceConfig,
)
from megarl.config.sections.monitor import MonitorConfig
from megarl.config.sections.policy_model import ModelConfig
from megarl.config.sections.rewards import RewardConfig
from megarl.config.sections.rollout import RolloutConfig
from megarl.config.sections.sampling import SamplingConfig
from megarl.config.sections.sandbox import SandboxConfig
from megarl.config.sections.schedule import CheckpointConfig, EvaluationConfig, TrainConfig, WeightsConfig
from megarl.config.sections.trainer import TrainerConfig
from megarl.files.model_folder import find_folder


class Recipe(Section):
    """Recipe of one run: all sections, and properties derived from several sections."""

    name: Name
    """Name of the run and of its folder."""
    loop: Literal["rl", "sft", "preference", "reward_model", "distillation"]
    """Training loop: rl (reinforcement learning), sft (supervised fine-tuning), preference (DPO and similar),
    reward_model, or distillation (from a teacher, on samples of the policy)."""
    seed: Annotated[NonNegativeInt, Decides(vllm="seed")] = 0
    """Random seed of data order, sampling and initialisation."""
    runs_folder: str = "runs"
    """Parent folder of run folders. Paths are relative to the current folder."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers that receive metrics and samples (default: [tensorboard]). Also wandb, mlflow, trackio, or your own
    package.module:Class. Prometheus: see monitor.port. The run folder always gets metrics.jsonl and samples/."""
    samples_every_steps: Annotated[PositiveInt, OnlyIf(ON_POLICY)] = 1
    """Write prompts, completions and rewards to the run folder's samples/ every n steps (loops rl, distillation).
    Default: 1."""
    # The forward pass is needed only where the step computes no trainer log-probs before its update.
    samples_with_tokens: Annotated[int, Field(ge=0, le=64), OnlyIf(*ADVANTAGES)] = 4
    """Samples per step recorded token by token, with log-probs of engine and trainer, for `megarl report`: those with
    the highest and lowest advantages. Default: 4; 0: none. Interval: samples_every_steps. Files: tokens/ of the run
    folder. May cost a forward pass (loop rl, distillation of sampled tokens)."""
    model: ModelConfig
    """Policy model."""
    data: DataConfig
    """Training and validation data."""
    mixture: Annotated[dict[Name, SourceConfig], OnlyIf(ON_POLICY)] = Field(default_factory=dict)
    """Several data sources in one run: a mapping from name to source (loops rl, distillation). A source has a `weight`
    and values for fields of data, rollout, reward, distillation and evaluation. All samples of a group come from one
    source. Metrics per source: environment/NAME/, val/SET/."""
    cluster: ClusterConfig = ClusterConfig()
    """Nodes (machines), ranks (one process per GPU), and the launcher of the ranks."""
    trainer: TrainerConfig = TrainerConfig()
    """Megatron-Core trainer: parallel sizes, micro-batch size, and savings of memory."""
    lora: LoraConfig = LoraConfig()
    """LoRA adapters of the policy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""
    rollout: Annotated[RolloutConfig, OnlyIf(*ENGINE)] = RolloutConfig()
    """vLLM engines: parallel size, sampling, environments, asynchrony."""
    reward: Annotated[RewardConfig, OnlyIf(*ENGINE)] = RewardConfig()
    """Reward functions and reward model."""
    sandbox: Annotated[SandboxConfig, OnlyIf(*ENGINE, SANDBOX)] = SandboxConfig()
    """Sandbox: isolated execution of programs written by the policy (reward code, environment python), and their
    limits."""
    algorithm: Annotated[AlgorithmConfig, OnlyIf(RL)] = AlgorithmConfig()
    """Advantage estimator, policy loss, KL and their settings (rl, distillation)."""
    critic: Annotated[CriticConfig, OnlyIf(*GAE)] = CriticConfig()
    """Critic (value model) of PPO, in loop rl with algorithm.advantage gae only."""
    preference: Annotated[PreferenceConfig, OnlyIf(PREFERENCE)] = PreferenceConfig()
    """Loss of the loops preference and reward_model."""
    distillation: Annotated[DistillationConfig, OnlyIf(DISTILLATION)] = DistillationConfig()
    """Loop distillation: teacher models, and the loss that compares the policy with them."""
    train: TrainConfig = TrainConfig()
    """Batch sizes, number of steps, and limits that end the run."""
    evaluation: Annotated[EvaluationConfig, OnlyIf(EVALUATED)] = EvaluationConfig()
    """Evaluation on the validation sets."""
    weights: WeightsConfig = WeightsConfig()
    """Reshard: the copying of weights from the trainer into the engines after an update."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and exports during a run."""
    health: HealthConfig = HealthConfig()
    """Health rules, which warn when a run does not learn: disabled rules, and thresholds. See train.on_unhealthy."""
    monitor: MonitorConfig = MonitorConfig()
    """Observation by other programs: Prometheus metrics and health over HTTP. Off by default."""

    # Private attributes, not fields: they are neither validated nor written as part of the recipe.
    _references: dict[Place, str] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, raw_values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the mixture's sources, then set `algorithm.overlong_buffer` if only the preset has a value for
        it.
        """
        values_with_train = with_train_of_first_source(raw_values)
        recipe = validate(values_with_train)
        if values_with_train is not raw_values:
            # A source set data.train, not the user. If it counted as set, all sources would be reported to override it.
            recipe.data.model_fields_set.discard("train")
        check_sources(recipe)
        return recipe.with_overlong_buffer()

    def with_overlong_buffer(self) -> Self:
        """Return the recipe with `algorithm.overlong_buffer` from `algorithm.preset`, if the recipe does not set it.

        The preset gives a fraction of `rollout.sampling.max_new_tokens`.
        """
        algorithm = self.algorithm
        divisor = OVERLONG_PARTS.get(algorithm.preset or "")
        if divisor is None or "overlong_buffer" in algorithm.model_fields_set:
            return self
        new_algorithm = algorithm.model_copy(
            update={"overlong_buffer": max(1, self.rollout.sampling.max_new_tokens // divisor)}
        )
        # The user did not set it, so a source with another max_new_tokens computes its own value.
        new_algorithm.model_fields_set.discard("overlong_buffer")
        return self.model_copy(update={"algorithm": new_algorithm})

    # The properties below are facts of several sections. They stay here, so that callers need not know which sections
    # decide a fact.

    @property
    def references(self) -> Mapping[Place, str]:
        return self._references

    def with_references(self, references: Mapping[Place, str]) -> Self:
        """Return a copy that writes values from the environment as references like `${oc.env:HF_TOKEN}`."""
        copy = self.model_copy()
        copy._references = dict(references)
        return copy

    @property
    def notices(self) -> tuple[str, ...]:
        return self._notices

    def with_notices(self, notices: Sequence[str]) -> Self:
        copy = self.model_copy()
        copy._notices = tuple(notices)
        return copy

    def override_of(self, folder: str) -> Mapping[str, Any]:
        """`model.override_config` changes the policy's folder only."""
        return self.model.override_config if folder == self.model.folder else {}

    @property
    def drafter(self) -> str | None:
        """Folder or Hub name of the engines' EAGLE-3 drafter, or None."""
        config = self.rollout.vllm.get("speculative_config")
        if not self.has_engine or not isinstance(config, Mapping) or config.get("method") != "eagle3":
            return None
        return config.get("model") or None

    @property
    def trains_drafter(self) -> bool:
        return self.drafter is not None and self.trainer.drafter_learning_rate is not None

    @property
    def sends_adapter(self) -> bool:
        """Whether a reshard sends only a LoRA adapter. False until a start has replaced `lora.sync: auto`."""
        return self.has_engine and self.lora.rank > 0 and self.lora.sync == "adapter"

    @property
    def has_reference(self) -> bool:
        """Whether the run needs a reference model (a frozen copy of the initial policy)."""
        if self.loop == "distillation":
            return "reference" in self.teacher_models
        return self.has_kl_penalty or (self.loop == "preference" and self.preference.loss in ("dpo", "ipo", "kto"))

    @property
    def has_kl_penalty(self) -> bool:
        return self.loop == "rl" and self.algorithm.kl_coefficient > 0

    @property
    def has_critic(self) -> bool:
        return self.loop == "rl" and self.algorithm.advantage == "gae"

    @property
    def model_paths(self) -> dict[str, str]:
        """Paths or Hub names of policy, critic, reward model and teachers, by recipe field.

        A run of 0 steps needs no teacher.
        """
        paths = {
            "model.path": self.model.path,
            "critic.path": self.critic.path if self.has_critic else None,
            "reward.model": self.reward.model if self.loop == "rl" else None,
        }
        if self.loop == "distillation" and self.train.steps:
            teachers = {
                source.place("distillation.teacher"): source.recipe.distillation.teacher for source in self.sources
            }
            paths |= {field: teacher for field, teacher in teachers.items() if teacher not in SELF_TEACHERS}
        return {field: path for field, path in paths.items() if path}

    @property
    def further_models(self) -> dict[str, str]:
        return {field: find_folder(path) for field, path in self.model_paths.items() if field != "model.path"}

    @property
    def teachers(self) -> dict[str, str]:
        """Folders of teachers by their names on the ranks: teacher0, teacher1, ..."""
        folders = (folder for field, folder in self.further_models.items() if field.endswith("distillation.teacher"))
        return {f"teacher{number}": folder for number, folder in enumerate(dict.fromkeys(folders))}

    @property
    def teacher_models(self) -> tuple[str, ...]:
        """Names of all teachers on the ranks: teacher0 and so on, then `reference` and `live_teacher`.

        `live_teacher` is the model in training (distillation.teacher policy).
        """
        if self.loop != "distillation" or not self.train.steps:
            return ()
        teacher_names = {source.recipe.distillation.teacher for source in self.sources}
        return (*self.teachers, *(name for teacher, name in SELF_TEACHERS.items() if teacher in teacher_names))

    @property
    def teacher_numbers(self) -> dict[str, int]:
        """Number of each source's teacher (its index in `teacher_models`), by the source's name."""
        names = self.teacher_models
        name_by_folder = {folder: name for name, folder in self.teachers.items()}
        numbers: dict[str, int] = {}
        for source in self.sources:
            teacher = source.recipe.distillation.teacher or ""
            name = SELF_TEACHERS.get(teacher) or name_by_folder.get(find_folder(teacher))
            if name in names:
                numbers[source.name] = names.index(name)
        return numbers

    # dp follows from the other sizes. Sequence parallelism needs tp > 1, so with tp 1 it returns to its default.
    @property
    def for_teachers(self) -> Self:
        """Copy of the recipe with the teachers' parallel sizes in place of the trainer's."""
        if not (sizes := self.distillation.sizes):
            return self
        # Fields of the trainer that are not sizes get their defaults.
        teacher_values = sizes | {"dp": None, "vpp": 1, "rank_order": "tp-cp-ep-dp-pp"}
        if sizes["tp"] == 1:
            teacher_values["sequence_parallel"] = None
        trainer = self.trainer.model_copy(update=teacher_values)
        return self.model_copy(update={"trainer": trainer})

    @property
    def is_on_policy(self) -> bool:
        return self.loop in ("rl", "distillation")

    @property
    def logprob_gap_limit(self) -> float | None:
        """Mean distance of trainer and engine log-probs, in nats, above which updates are skipped; None: no limit."""
        return 0.0 if self.exact_blocks else self.train.max_logprob_gap

    @property
    def exact_blocks(self) -> int:
        """Number of equal blocks in which a matrix product over ranks is summed; 0: trainer.exact is off.

        It is the maximum of trainer.tp, trainer.etp and rollout.tp.
        """
        return (
            max(self.trainer.tp, self.trainer.etp, self.rollout.tp) if self.is_on_policy and self.trainer.exact else 0
        )

    @property
    def has_advantages(self) -> bool:
        """Whether the loss multiplies tokens by advantages, and does not compare whole distributions."""
        return self.loop == "rl" or (self.loop == "distillation" and self.distillation.loss == "sampled_token")

    @property
    def trains_rewards(self) -> bool:
        return self.loop == "rl" or (
            self.loop == "distillation" and self.has_advantages and self.distillation.use_task_rewards
        )

    @property
    def frozen_steps(self) -> int:
        return self.critic.warmup_steps if self.has_critic else 0

    @property
    def sequences_per_example(self) -> int:
        """2 for a pair of chosen and rejected answer."""
        return 2 if self.loop == "reward_model" or (self.loop == "preference" and self.preference.loss != "kto") else 1

    @property
    def has_engine(self) -> bool:
        return self.is_on_policy or (self.loop == "sft" and bool(self.data.validation))

    @property
    def separate_ranks(self) -> int:
        """Number of ranks that only sample (`rollout.ranks`, or those of `cluster.groups.engines`); 0: colocated."""
        if not self.has_engine or self.rollout.placement != "separate":
            return 0
        engines = self.cluster.groups.engines
        return self.rollout.ranks or (engines.num_ranks if engines is not None else 0)

    @property
    def trainer_ranks(self) -> int:
        node_ranks = self.cluster.nodes * self.cluster.ranks_per_node
        return node_ranks if self.cluster.groups.engines is not None else node_ranks - self.separate_ranks

    @property
    def validation_sets(self) -> tuple[str, ...]:
        source_names = [name for source in self.sources for name in source.recipe.data.validation]
        return tuple(dict.fromkeys([*source_names, *self.data.validation_conversations]))

    @property
    def evaluates_first(self) -> bool:
        return self.evaluation.at_start or not self.train.steps

    def evaluates_at(self, step: int) -> bool:
        interval = self.evaluation.every_steps
        return bool(self.validation_sets) and (step == self.train.steps or (interval > 0 and step % interval == 0))

    def overlaps_at(self, step: int) -> bool:
        return self.weights.overlap and step < self.train.steps and not self.evaluates_at(step)

    def reshards_at(self, step: int) -> bool:
        return step % self.rollout.sync_every == 0 or self.evaluates_at(step)

    @property
    def sources(self) -> tuple[SourceRecipe, ...]:
        return sources(self)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sampled sequence: prompt, completions and tool replies."""
        return max(source.recipe._context_tokens for source in self.sources)

    @property
    def trained_tokens(self) -> int:
        recipes = [source.recipe for source in self.sources]
        return max(recipe.data.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens for recipe in recipes)

    @property
    def teacher_tokens(self) -> int:
        """Maximum tokens of a sequence with the teacher's own prompt; 0: it reads the policy's prompt."""
        recipes = [source.recipe for source in self.sources] if self.loop == "distillation" else []
        max_teacher_tokens = self.distillation.max_teacher_tokens or 2 * self.trained_tokens
        return max_teacher_tokens if any(recipe.distillation.teacher_prompt is not None for recipe in recipes) else 0

    @property
    def longest_trajectory(self) -> int:
        return max(source.recipe._longest_trajectory for source in self.sources)

    @property
    def _longest_trajectory(self) -> int:
        """Maximum number of tokens that the policy samples in one attempt, over all turns."""
        rollout = self.rollout
        max_sampled_tokens = rollout.turns_of_attempt * rollout.sampling.max_new_tokens
        if rollout.turns_of_attempt == 1:
            return max_sampled_tokens
        if rollout.history == "append" and rollout.environment != "command":
            # All turns are in one sequence, so they share the context. Rendered histories and the calls of a program
            # are separate sequences, each with its own context.
            max_sampled_tokens = min(max_sampled_tokens, self.data.max_prompt_tokens + rollout.sampling.max_new_tokens)
        return min(max_sampled_tokens, rollout.budget.sampled_tokens or max_sampled_tokens)

    @property
    def _context_tokens(self) -> int:
        max_new_tokens = max(self.rollout.sampling.max_new_tokens, self.evaluation_sampling.max_new_tokens)
        return self.data.max_prompt_tokens + max_new_tokens

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """Sampling of evaluations: unset fields are those of `rollout.sampling`, except the repetition penalty."""
        changes = self.evaluation.sampling.model_dump(exclude_none=True, exclude={"repetition_penalty"})
        changes["temperature_schedule"] = "constant"
        if self.evaluation.samples_per_prompt == 1:
            changes.setdefault("temperature", 0.0)
        return self.rollout.sampling.model_copy(update=changes)
