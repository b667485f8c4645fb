"""The recipe's schema: every field, its default and its meaning. Frozen, strict about keys, no torch.

What one field can tell is checked here; what several fields, the model folder or the data decide is checked by
`preflight.check`; both end in the same one-page error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Section(BaseModel):
    """A part of the recipe: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class ModelConfig(Section):
    path: str
    """Folder of the Hugging Face model that training starts from: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and of the matrix products, in the trainer and in the engine alike."""


class ClusterConfig(Section):
    launcher: Literal["local"] = "local"
    """Who starts the ranks: `local` spawns them on this machine."""
    nodes: PositiveInt = 1
    """Machines in the job."""
    ranks_per_node: PositiveInt = 1
    """Ranks on each machine: one per GPU, or one per CPU slot."""
    start_timeout_seconds: PositiveFloat = 300.0
    """Give up if the ranks are not all connected after this long."""
    collective_timeout_seconds: PositiveFloat = 1800.0
    """A collective that waits longer than this ends the run."""

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


class OptimizerConfig(Section):
    name: Literal["adam", "sgd"] = "adam"
    """AdamW, or gradient descent without momentum, which has no state (needs trainer.distributed_optimizer false)."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """What follows the warm-up: flat, a fall to `min_learning_rate`, or flat and then a linear fall (wsd)."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps of the fall that ends a wsd schedule; left out, a tenth of the run."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from zero."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where a falling schedule ends."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW) on matrices; norms and biases have none."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""
    epsilon: PositiveFloat = 1e-8
    """Adam's denominator term."""
    clip_grad_norm: NonNegativeFloat = 1.0
    """Scale the gradient down to this global norm; 0 leaves it."""
    max_skipped_updates: NonNegativeInt = 3
    """Updates in a row that may be skipped because loss or gradient is not finite, before the run ends."""


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 1024
    """Longest completion."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy. The trainer's log-probs use the same."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus mass; 1 keeps all tokens."""
    top_k: NonNegativeInt = 0
    """Sample among the k most likely tokens; 0 keeps all."""
    stop: tuple[str, ...] = ()
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
    "prompt" and "response"), "chosen" and "rejected" (preference), "response" and "label" (preference by kto)."""
    validation: dict[Name, str] = Field(default_factory=dict)
    """Held-out JSONL files by name, problems to answer or pairs (preference); the metric is val/NAME/accuracy."""
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
    num_workers: PositiveInt = 2
    """Processes that score completions while others are still sampled."""
    timeout_seconds: PositiveFloat = 5.0
    """A completion that takes longer to score gets zero, and its process is replaced."""
    correct_score: float = 1.0
    """Score of a right answer (ColossalRL: 10)."""


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "aggregation": "sequence_mean_token_mean", "kl_coefficient": 0.001},
    "dr_grpo": {"advantage": "grpo", "normalize_by_std": False, "aggregation": "constant_length"},
    "dapo": {
        "advantage": "grpo", "clip_high": 0.28, "aggregation": "token_mean", "filter_range": (0.0, 1.0),
        "overlength_buffer": 0.2, "mask_truncated": True,
    },
    "rloo": {"advantage": "rloo", "policy_loss": "policy_gradient", "kl_coefficient": 0.001, "kl_in": "reward",
             "kl_estimator": "k1", "aggregation": "sequence_mean_token_sum"},
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus", "normalize_by_std": False, "whiten_advantages": True,
        "kl_coefficient": 0.001, "kl_in": "return", "kl_estimator": "k1",
    },
    "gspo": {
        "advantage": "grpo", "policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
    },
    "cispo": {"advantage": "grpo", "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 2.0},
}  # fmt: skip
"""Fields of `algorithm` that a published method sets; a recipe names one and may change it field by field."""


class AlgorithmConfig(Section):
    preset: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "gspo", "cispo"] | None = None
    """A published method's values of these fields, where the recipe gives none of its own."""
    advantage: Literal[
        "grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "global_baseline", "pass_at_k"
    ] = "grpo"
    """Advantage estimator of `algorithms.advantages`."""
    normalize_by_std: bool = True
    """Divide advantages by a standard deviation where the estimator has one (GRPO); without, Dr. GRPO."""
    pass_k: PositiveInt = 4
    """Samples of which one shall pass (advantage pass_at_k)."""
    whiten_advantages: bool = False
    """Bring the advantages of all tokens of a step to mean 0 and variance 1."""
    policy_loss: Literal["policy_gradient", "clipped", "gspo", "gmpo", "cispo", "sapo"] = "clipped"
    """Per-token loss of `algorithms.policy_losses`."""
    clip_low: PositiveFloat = 0.2
    """The ratio counts down to 1 - clip_low (gmpo: its logarithm down to -clip_low)."""
    clip_high: PositiveFloat = 0.2
    """The ratio counts up to 1 + clip_high (DAPO's clip-higher: 0.28)."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound of the loss for negative advantages (dual-clip PPO)."""
    largest_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """Ratios above are held there before anything else (ColossalChat: 10)."""
    skip_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """An update is skipped if the mean ratio of its tokens is above (ColossalRL's skip_threshold: 20)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference model; 0 loads no reference model."""
    kl_in: Literal["loss", "reward", "return", "advantage"] = "loss"
    """Where the KL counts: in the loss; summed over a sample in its reward; summed from a token on in that token's
    advantage (return: REINFORCE++); or each token's in its own advantage."""
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = "k3"
    """Estimator of `algorithms.kl`."""
    kl_target: PositiveFloat | None = None
    """Adapt the coefficient so that the KL stays near this many nats a token; left out, it is constant."""
    kl_horizon: PositiveFloat = 10000.0
    """Samples in which an adapted coefficient changes by a fifth at most."""
    correction: (
        Literal["truncated", "band", "sequence_truncated", "sequence_rejection", "geometric_rejection"] | None
    ) = None
    """Correction of `algorithms.importance` for the gap between trainer and engine; left out, none."""
    correction_low: NonNegativeFloat = 0.5
    """Lowest ratio of trainer to engine that a band or rejection accepts."""
    correction_high: PositiveFloat = 2.0
    """Highest ratio that is accepted, or to which it is cut."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length", "sample_level"
    ] = "token_mean"
    """How token losses become one number, over the whole batch (`algorithms.reduction`)."""
    old_logprobs: Literal["rollout", "trainer"] = "trainer"
    """Whose log-probs the ratio starts from: the engine's, or the trainer's before the update."""
    filter_range: tuple[float, float] | None = None
    """Train only on groups whose accuracy is between the two, both excluded; others are drawn instead (DAPO)."""
    max_attempts: PositiveInt = 10
    """Batches of prompts that one step may draw to fill itself, before the run ends."""
    oversampling: Annotated[float, Field(ge=1.0)] = 1.0
    """Prompts drawn at once over prompts a step, where groups are filtered; what is left over serves the next step."""
    overlength_buffer: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Last share of rollout.sampling.max_new_tokens in which the reward falls off, to -reward.correct_score at its end
    (DAPO's soft punishment: 0.2)."""
    mask_truncated: bool = False
    """Train no token of a completion that hit the length limit."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(preset := given.get("preset"), str):
            return PRESETS.get(preset, {}) | given
        return given


class PreferenceConfig(Section):
    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """Loss of `algorithms.preference_losses`; dpo, ipo and kto load a reference model, kto takes single answers."""
    beta: PositiveFloat = 0.1
    """How hard the reference holds (dpo, ipo, kto), scale of the rewards (simpo: 2), weight of the odds (orpo)."""
    margin: NonNegativeFloat = 0.0
    """By how much the chosen answer's reward must be higher (dpo, simpo: 1)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Share of the pairs that is taken for swapped (dpo)."""
    normalize_by_length: bool = False
    """Compare means over tokens instead of sums (dpo, ipo)."""
    desirable_weight: PositiveFloat = 1.0
    """What a good answer counts (kto)."""
    undesirable_weight: PositiveFloat = 1.0
    """What a bad answer counts (kto); the weights shall balance how many there are of each."""


class TrainConfig(Section):
    steps: PositiveInt = 100
    """Steps to train: rollouts in `rl`, optimizer updates elsewhere."""
    prompts_per_step: PositiveInt = 32
    """Prompts sampled in one rl step; conversations in one sft step; pairs in one preference step."""
    samples_per_prompt: PositiveInt = 8
    """Completions per prompt (rl): the group that a sample is compared with."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates that one rl step's samples are split into."""


class EvaluationSamplingConfig(Section):
    max_new_tokens: PositiveInt | None = None
    """Longest completion; left out, that of `rollout.sampling`."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus mass; 1 keeps all tokens."""
    top_k: NonNegativeInt = 0
    """Sample among the k most likely tokens; 0 keeps all."""
    stop: tuple[str, ...] | None = None
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
    loop: Literal["rl", "sft", "preference"]
    """What to run: reinforcement learning, supervised fine-tuning, or learning from pairs of answers."""
    seed: NonNegativeInt = 0
    """Decides data order, sampling and initialisation."""
    runs_folder: str = "runs"
    """Where run folders are made; relative to the current folder, as all paths here."""
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
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam and its schedule."""
    rollout: RolloutConfig = RolloutConfig()
    """vLLM: parallel size and sampling."""
    reward: RewardConfig = RewardConfig()
    """What is good."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss (rl)."""
    preference: PreferenceConfig = PreferenceConfig()
    """Loss (preference)."""
    train: TrainConfig = TrainConfig()
    """Batch sizes and length of the run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    weights: WeightsConfig = WeightsConfig()
    """The reshard."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved on the way."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the model that training starts from."""
        if self.loop == "rl":
            return self.algorithm.kl_coefficient > 0
        return self.loop == "preference" and self.preference.loss in ("dpo", "ipo", "kto")

    @property
    def answers_together(self) -> int:
        """Sequences that share a row because the loss compares them."""
        return 2 if self.loop == "preference" and self.preference.loss != "kto" else 1

    @property
    def has_engine(self) -> bool:
        """Whether anything is sampled."""
        return self.loop == "rl" or (self.loop == "sft" and bool(self.data.validation))

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """`evaluation.sampling`, and from `rollout.sampling` what it leaves out."""
        own = self.evaluation.sampling.model_dump(exclude_none=True)
        return SamplingConfig(**self.rollout.sampling.model_dump() | own)
