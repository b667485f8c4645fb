"""The recipe's schema: every field, its default and its meaning. Frozen, strict about keys, no torch.

What one field can tell is checked here; what several fields, the model folder or the data decide is checked by
`preflight.check`; both end in the same one-page error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    model_validator,
)

from megarl.config.learning import (
    OVERLONG_PARTS,
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    PreferenceConfig,
)
from megarl.config.secrets import Place
from megarl.config.section import Section

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
StopString = Annotated[str, Field(min_length=1)]


class ModelConfig(Section):
    path: str
    """Folder of the Hugging Face model that training starts from: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and of the matrix products, in the trainer and in the engine alike."""


class ClusterConfig(Section):
    launcher: Literal["local", "slurm", "ray"] = "local"
    """Who starts the ranks: `local` spawns them on this machine; `slurm` has srun start a task for each, within a job
    (launch/slurm/train.sbatch); `ray` has a Ray cluster place them."""
    ray_address: str = "auto"
    """Where the Ray cluster answers: HOST:PORT, or `auto` for the one that this machine belongs to."""
    nodes: PositiveInt = 1
    """Machines in the job."""
    ranks_per_node: PositiveInt = 1
    """Ranks on each machine: one per GPU, or one per CPU slot."""
    start_timeout_seconds: PositiveFloat = 300.0
    """Give up if the ranks are not all connected after this long."""
    build_timeout_seconds: PositiveFloat = 3600.0
    """Give up if the ranks have not built and loaded their models after this long; the rank that hangs is named."""
    verb_timeout_seconds: PositiveFloat = 300.0
    """Give up if a rank has not answered a call, such as an update or a reshard, after this long or after ten times
    the longest that this call has taken so far, whichever is more. A call's first three may take
    collective_timeout_seconds, and later ones take no more, unless this field is larger. Sampling may take the time
    that it was given besides. Who is late is named, with the stacks of all ranks."""
    checkpoint_timeout_seconds: PositiveFloat = 3600.0
    """Give up if a checkpoint or a model is not written, or a checkpoint not read, after this long."""
    collective_timeout_seconds: PositiveFloat = 1800.0
    """A collective that waits longer than this ends the run."""
    signal_seconds: PositiveInt = 300
    """How long before its time limit a Slurm job is told to save: longer than updates and a checkpoint take."""
    srun_options: tuple[str, ...] = ()
    """Options of srun besides, such as a container's: --container-image=FILE, --container-mounts=FROM:TO."""
    preflight: bool = True
    """Look at every node before anything heavy starts there: folders, disk, GPUs, clock, ports, bandwidth."""
    min_bandwidth_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    """Refuse a node where a rank's links carry less than this share of what the median rank's do."""
    max_restarts: NonNegativeInt = 5
    """Times that a run may be taken up again in a row without a step gained."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


class TrainerConfig(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size: heads, feed-forward and vocabulary are split over so many ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel size: the layers are split over so many stages."""
    dp: PositiveInt | None = None
    """Data-parallel size; left out, what remains of the world: ranks / (tp * pp * cp)."""
    vpp: PositiveInt = 1
    """Model chunks of each pipeline stage (interleaved schedule)."""
    cp: PositiveInt = 1
    """Context-parallel size: the tokens of a sequence are split over so many ranks."""
    ep: PositiveInt = 1
    """Expert-parallel size: the experts are dealt out to so many ranks."""
    etp: PositiveInt = 1
    """Expert-tensor-parallel size: each expert is split over so many ranks."""
    rank_order: Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"] = "tp-cp-ep-dp-pp"
    """Megatron's order of ranks, the first axis fastest. With dp last, all stages of a replica are neighbours, weights
    cross fewer nodes in a reshard and gradients more in an update; `megarl plan` counts the former."""
    align_ranks: bool = True
    """Where it saves bytes in a reshard, deal neighbouring ranks parts of the trainer that lie far apart."""
    sequence_parallel: bool | None = None
    """Split norms and residuals over the tensor-parallel ranks too; left out, on where tp > 1."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    router_replay: bool = False
    """Train with the experts that the engine chose for each token (mixtures of experts)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Compute again in the backward pass instead of keeping: the attention's inside, or whole layers."""
    offload: tuple[Literal["optimizer", "gradients", "parameters"], ...] = ()
    """What leaves the accelerator for host memory while the engine samples; nothing where all fits."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Cap on the padded tokens of one packed row of one data-parallel rank."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are alive at once."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron-Core's TransformerConfig to set besides, by their own names."""


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 1024
    """Longest completion."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy. The trainer's log-probs use the same."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus mass; 1 keeps all tokens. What is trained on (loop rl) is sampled from all of them: 1."""
    top_k: NonNegativeInt = 0
    """Sample among the k most likely tokens; 0 keeps all. What is trained on (loop rl) is sampled from all: 0."""
    stop: tuple[StopString, ...] = ()
    """Texts that end a completion; they stay part of it."""


class RolloutConfig(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size of each vLLM engine; the world holds ranks / tp replicas."""
    sampling: SamplingConfig = SamplingConfig()
    """How training completions are sampled."""
    max_concurrent_requests: PositiveInt = 256
    """Completions that one engine decodes at once."""
    kv_cache_gib: PositiveFloat = 1.0
    """Memory of one rank's KV cache."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Fields of vLLM's EngineArgs to set besides, by their own names."""


class DataConfig(Section):
    train: str
    """JSONL file of training records: {"messages": {...} or [...]} with "gt_answer" (rl), an assistant's turn (sft; or
    "prompt" and "response"), "chosen" and "rejected" (preference, reward_model), "response" and "label" (kto)."""
    validation: dict[Name, str] = Field(default_factory=dict)
    """Held-out JSONL files by name: problems to answer, or pairs (preference, reward_model); the metric is
    val/NAME/accuracy."""
    validation_conversations: dict[Name, str] = Field(default_factory=dict)
    """Held-out JSONL files of conversations by name (sft); the metric is val/NAME/loss."""
    ptx: str | None = None
    """JSONL file of conversations, as for sft, that rl trains on beside its own answers (algorithm.ptx_coefficient)."""
    answer_field: str = "gt_answer"
    """Field of a record that holds the gold answer."""
    system_prompt: str | None = None
    """System message put before each conversation that has none."""
    max_prompt_tokens: PositiveInt = 1024
    """A record whose rendered prompt is longer is an error."""
    shuffle: bool = True
    """New order each epoch, from the run's seed; otherwise the file's order."""


class RewardConfig(Section):
    functions: tuple[str, ...] = ("boxed",)
    """Reward functions whose scores are added: names of `megarl.rewards`, or `package.module:function`."""
    function_weight: NonNegativeFloat = 1.0
    """What the functions' scores count; 0: they only say what is right, a reward model alone what is good."""
    model: str | None = None
    """Folder of a reward model (sequence classification with one label, the policy's vocabulary) whose score of prompt
    and completion is added."""
    model_weight: PositiveFloat = 1.0
    """What the reward model's score counts."""
    model_clip: PositiveFloat | None = None
    """The reward model's scores are held between minus and plus this (ColossalChat: 5)."""
    num_workers: PositiveInt = 2
    """Processes that score completions while others are still sampled."""
    timeout_seconds: PositiveFloat = 5.0
    """CPU seconds that the functions and what they start may take for one completion; beyond, it gets zero and the
    process is replaced."""
    wall_timeout_seconds: PositiveFloat | None = None
    """Seconds by the clock, for functions that wait or hang; left out, ten times timeout_seconds, at least 30."""
    max_failed_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """The run ends where a larger fraction of a step's or an evaluation's completions failed or timed out
    (reward/errors, reward/timeouts)."""
    correct_score: float = 1.0
    """Score of a right answer (ColossalRL: 10)."""


class TrainConfig(Section):
    steps: NonNegativeInt = 100
    """Steps to train: rollouts in `rl`, optimizer updates elsewhere; 0: only evaluate the validation sets."""
    prompts_per_step: PositiveInt = 32
    """Prompts sampled in one rl step; conversations in one sft step; pairs in one preference step."""
    samples_per_prompt: PositiveInt = 8
    """Completions per prompt (rl): the group that a sample is compared with."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates that one rl step's samples are split into."""
    epochs_per_step: PositiveInt = 1
    """Passes over one rl step's samples, each in `updates_per_step` updates; shuffled anew from the second on. The
    critic's updates are those of `critic.updates_per_step`."""

    @property
    def num_updates(self) -> int:
        """The policy's optimizer updates in one rl step."""
        return self.epochs_per_step * self.updates_per_step


class EvaluationSamplingConfig(Section):
    max_new_tokens: PositiveInt | None = None
    """Longest completion; left out, that of `rollout.sampling`."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus mass; 1 keeps all tokens."""
    top_k: NonNegativeInt = 0
    """Sample among the k most likely tokens; 0 keeps all."""
    stop: tuple[StopString, ...] | None = None
    """Texts that end a completion; left out, those of `rollout.sampling`."""


class EvaluationConfig(Section):
    every_steps: NonNegativeInt = 0
    """Evaluate the validation sets at each such step, and always before the first and after the last; 0: only those."""
    max_problems: PositiveInt | None = None
    """Use the first so many problems of each set; left out, all."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """How completions are sampled for evaluation."""


class WeightsConfig(Section):
    bucket_mib: PositiveInt = 256
    """Staging memory of one reshard bucket; two are alive at most."""
    verify_every: NonNegativeInt = 0
    """Compare checksums of the engine's live parameters with the trainer's after each so many steps' reshard; 0: only
    once, before training."""


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = 0
    """Save the trainer's state at each such step and after the last, for `megarl train --resume`; 0: never."""
    keep: PositiveInt = 2
    """Checkpoints to keep, the newest; an older one goes when a newer one is complete."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in host memory."""
    export_every_steps: NonNegativeInt = 0
    """Write the model as a Hugging Face folder hf_step_NNNNNN at each such step; 0: only at the end."""


class Recipe(Section):
    """One run."""

    name: Name
    """Name of the run and of its folder."""
    loop: Literal["rl", "sft", "preference", "reward_model"]
    """What to run: reinforcement learning, supervised fine-tuning, learning from pairs of answers, or a model that
    scores answers, learnt from such pairs."""
    seed: NonNegativeInt = 0
    """Decides data order, sampling and initialisation."""
    runs_folder: str = "runs"
    """Where run folders are made; relative to the current folder, as all paths here."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics and samples go beside metrics.jsonl and samples/ of the run folder: names of
    `tracking.trackers.TRACKERS`, or package.module:Class of your own."""
    samples_every_steps: PositiveInt = 1
    """Write prompts, completions and rewards to samples/ at each such step."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """The data."""
    cluster: ClusterConfig = ClusterConfig()
    """The machines."""
    trainer: TrainerConfig = TrainerConfig()
    """Megatron: parallel sizes and memory."""
    lora: LoraConfig = LoraConfig()
    """Adapters of the policy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam and its schedule."""
    rollout: RolloutConfig = RolloutConfig()
    """vLLM: parallel size and sampling."""
    reward: RewardConfig = RewardConfig()
    """What is good."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss (rl)."""
    critic: CriticConfig = CriticConfig()
    """The critic (rl with advantage gae)."""
    preference: PreferenceConfig = PreferenceConfig()
    """Loss (preference, reward_model)."""
    train: TrainConfig = TrainConfig()
    """Batch sizes and length of the run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    weights: WeightsConfig = WeightsConfig()
    """The reshard."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved on the way."""

    _references: dict[Place, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _with_overlong_buffer(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """The preset's share of the longest completion in tokens."""
        made = validate(given)
        algorithm = made.algorithm
        parts = OVERLONG_PARTS.get(algorithm.preset or "")
        if parts is None or "overlong_buffer" in algorithm.model_fields_set:
            return made
        resolved = algorithm.model_copy(
            update={"overlong_buffer": max(1, made.rollout.sampling.max_new_tokens // parts)}
        )
        resolved.model_fields_set.discard("overlong_buffer")
        return made.model_copy(update={"algorithm": resolved})

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
        """Folders of the models beside the policy's, by the fields that name them."""
        folders = {
            "critic.path": self.critic.path if self.has_critic else None,
            "reward.model": self.reward.model if self.loop == "rl" else None,
        }
        return {field: folder for field, folder in folders.items() if folder}

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
        return self.loop == "rl" or (self.loop == "sft" and bool(self.data.validation))

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """`evaluation.sampling`, and from `rollout.sampling` what it leaves out."""
        own = self.evaluation.sampling.model_dump(exclude_none=True)
        return SamplingConfig(**self.rollout.sampling.model_dump() | own)
