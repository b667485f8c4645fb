"""The parts of a recipe that say how it learns: adapters, optimizer, algorithm, critic, preferences."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megarl.config.formulas import either, formulas
from megarl.config.section import Section
from megarl.files.python_function import is_import_path

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


def _formula(field: str, *, takes_own: bool = False) -> AfterValidator:
    """A name of the table of `megarl.algorithms` that belongs to a field, or the import path of the user's own."""

    def known(name: str) -> str:
        if name in formulas(field) or (takes_own and is_import_path(name)):
            return name
        near = difflib.get_close_matches(name, formulas(field), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        own = "; your own as package.module:function or path/to/file.py:function" if takes_own else ""
        choices = either([repr(known) for known in formulas(field)])
        told = {"choices": choices, "own": own, "hint": hint}
        raise PydanticCustomError("formula", "must be {choices}{own}{hint}", told)

    return AfterValidator(known)


Advantage = Annotated[str, _formula("algorithm.advantage", takes_own=True)]
PolicyLoss = Annotated[str, _formula("algorithm.policy_loss", takes_own=True)]
ImportanceSampling = Annotated[str, _formula("algorithm.importance_sampling")]
Kwargs = dict[str, bool | int | float | str | None]
"""Keyword arguments of a formula, beside those that have a field of their own."""
PreferenceLoss = Annotated[str, _formula("preference.loss")]


class LoraConfig(Section):
    rank: NonNegativeInt = 0
    """Rank of the adapters that are trained beside the frozen policy; 0: there are none, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """What an adapter adds is scaled by alpha / rank."""
    dropout: Decay = 0.0
    """Share of an adapter's inputs that an update's passes drop."""
    targets: Annotated[tuple[Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ...], Field(min_length=1)] = (
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    )
    """Projections that get adapters, those of experts included; fused ones share an A."""
    export_adapter: bool = True
    """Write the adapters too, as a PEFT folder adapter/ (adapter_step_NNNNNN/) beside hf/, the merged model."""


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


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "aggregation": "sequence_mean_token_mean", "kl_coefficient": 0.001},
    "dr_grpo": {"advantage": "grpo", "normalize_by_std": False, "aggregation": "constant_length"},
    "dapo": {
        "advantage": "grpo", "clip_high": 0.28, "aggregation": "token_mean", "dynamic_sampling": (0.0, 1.0),
        "mask_truncated": True,
    },
    "rloo": {"advantage": "rloo", "policy_loss": "policy_gradient", "kl_coefficient": 0.001, "kl_placement": "reward",
             "kl_estimator": "k1", "aggregation": "sequence_mean_token_sum"},
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus", "normalize_by_std": False, "whiten_advantages": True,
        "kl_coefficient": 0.001, "kl_placement": "return", "kl_estimator": "k1",
    },
    "reinforce_plus_plus_baseline": {
        "advantage": "reinforce_plus_plus_baseline", "normalize_by_std": False, "whiten_advantages": True,
        "kl_coefficient": 0.001, "kl_estimator": "k2",
    },
    "gspo": {
        "advantage": "grpo", "policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
    },
    "cispo": {"advantage": "grpo", "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 2.0},
    "ppo": {
        "advantage": "gae", "whiten_advantages": True, "kl_coefficient": 0.001, "kl_placement": "reward",
        "kl_estimator": "k1",
    },
}  # fmt: skip
"""Fields of `algorithm` that a published method sets; a recipe names one and may change it field by field."""

OVERLONG_PARTS = {"dapo": 5}
"""Presets whose `overlong_buffer` is rollout.sampling.max_new_tokens over this, rounded down, but at least 1."""


class AlgorithmConfig(Section):
    preset: (
        Literal[
            "grpo",
            "dr_grpo",
            "dapo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "gspo",
            "cispo",
            "ppo",
        ]
        | None
    ) = None
    """A published method's values of these fields, where the recipe gives none of its own."""
    advantage: Advantage = "grpo"
    """Advantage estimator of `algorithms.advantages`; gae trains a critic beside the policy (PPO)."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """What a reward counts one token earlier (gae)."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """How far the advantage trusts rewards to come over the critic: 1 altogether, 0 not beyond a token (gae)."""
    normalize_by_std: bool = True
    """Divide advantages by a standard deviation where the estimator has one (GRPO); without, Dr. GRPO."""
    lone_sample: Literal["zero", "reward"] = "zero"
    """Advantage of a sample alone in its group (grpo, rloo, opo, reinforce_plus_plus_baseline): zero, for it is its own
    baseline, or its reward (verl)."""
    pass_k: PositiveInt = 4
    """Samples of which one shall pass (advantage pass_at_k)."""
    advantage_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the advantage estimator, such as {epsilon: 1e-4} of grpo."""
    whiten_advantages: bool = False
    """Bring the advantages of all tokens of a step to mean 0 and variance 1."""
    policy_loss: PolicyLoss = "clipped"
    """Per-token loss of `algorithms.policy_losses`."""
    clip_low: PositiveFloat = 0.2
    """The ratio counts down to 1 - clip_low (gmpo: its logarithm down to -clip_low)."""
    clip_high: PositiveFloat = 0.2
    """The ratio counts up to 1 + clip_high (DAPO's clip-higher: 0.28)."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound of the loss for negative advantages (dual-clip PPO)."""
    max_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """Ratios above are held there before anything else (ColossalChat: 10)."""
    policy_loss_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the policy loss, such as {temperature_negative: 1.1} of sapo."""
    skip_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """An update is skipped if the mean ratio of its tokens is above (ColossalRL's skip_threshold: 20)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference model; 0 loads no reference model."""
    kl_placement: Literal["loss", "reward", "return", "advantage"] = "loss"
    """Where the KL counts: in the loss; in the reward, each token's in its own (gae) or summed over the sample; summed
    from a token on in that token's advantage (return: REINFORCE++); or each token's in its own advantage."""
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = "k3"
    """Estimator of `algorithms.kl`."""
    k3_max: PositiveFloat | None = None
    """Largest k3 estimate of a token (verl: 10); left out, it has no bound. `kl/capped`: the share of tokens held."""
    kl_target: PositiveFloat | None = None
    """Adapt the coefficient so that the KL stays near this many nats a token; left out, it is constant."""
    kl_horizon: PositiveFloat = 10000.0
    """Samples in which an adapted coefficient changes by a fifth at most."""
    importance_sampling: ImportanceSampling | None = None
    """Correction of `algorithms.importance` for the gap between trainer and engine; left out, none."""
    importance_sampling_low: NonNegativeFloat = 0.5
    """Lowest ratio of trainer to engine that a band or rejection accepts."""
    importance_sampling_high: PositiveFloat = 2.0
    """Highest ratio that is accepted, or to which it is cut."""
    importance_sampling_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the correction."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length", "sample_level"
    ] = "token_mean"
    """How token losses become one number, over the whole batch (`algorithms.reduction`)."""
    count_masked_sequences: bool = False
    """Count sequences without a trained token (mask_truncated) among those that a mean over sequences divides by, as
    TRL does."""
    old_logprobs: Literal["rollout", "trainer"] = "trainer"
    """Whose log-probs the ratio starts from, of the weights that sampled: the engine's, or the trainer's, computed
    before the step's update where needed. With the engine's, `logprob_gap/` is that of a step's first update alone."""
    dynamic_sampling: tuple[float, float] | None = None
    """Train only on groups whose accuracy is between the two, both excluded; others are drawn instead (DAPO)."""
    max_attempts: PositiveInt = 10
    """Batches of prompts that one step may draw to fill itself, before the run ends."""
    oversampling: Annotated[float, Field(ge=1.0)] = 1.0
    """Prompts drawn at once over prompts a step, where groups are filtered; what is left over serves the next step."""
    overlong_buffer: PositiveInt | None = None
    """Last tokens of rollout.sampling.max_new_tokens over which the reward falls linearly, by reward.correct_score at
    the end (DAPO's soft overlong punishment). The preset dapo sets a fifth of max_new_tokens."""
    mask_truncated: bool = False
    """Train no token of a completion that hit the length limit."""
    ptx_coefficient: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share c of the conversations of data.ptx in each update's loss: (1 - c) * rl + c * cross-entropy (PPO-ptx)."""
    ptx_conversations: PositiveInt = 32
    """Conversations of data.ptx in one step."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        preset = given.get("preset") if isinstance(given, dict) else None
        if not isinstance(preset, str):
            return validate(given)
        made = validate(PRESETS.get(preset, {}) | given)
        # A preset's values are not the recipe's own: they may do nothing (`config.effects`).
        made.model_fields_set.intersection_update(given)
        return made


class CriticConfig(Section):
    path: str | None = None
    """Folder of the model that the critic starts from, a language model or a trained reward model with the policy's
    vocabulary; left out, model.path."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
    """The critic's own Adam and schedule."""
    clip: PositiveFloat | None = 0.2
    """A value counts as if it had moved no farther in one step, where that is worse for it; null: it moves freely."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which the critic alone is trained."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates of the critic that one step's samples are split into."""


class PreferenceConfig(Section):
    loss: PreferenceLoss = "dpo"
    """Loss of `algorithms.preference_losses`; dpo, ipo and kto load a reference model, kto takes single answers."""
    beta: PositiveFloat = 0.1
    """How hard the reference holds (dpo, ipo, kto), scale of the rewards (simpo: 2), weight of the odds (orpo)."""
    margin: NonNegativeFloat = 0.0
    """By how much the chosen answer's reward must be higher (dpo, simpo: 1; loop reward_model)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Share of the pairs that is taken for swapped (dpo)."""
    normalize_by_length: bool = False
    """Compare means over tokens instead of sums (dpo, ipo)."""
    desirable_weight: PositiveFloat = 1.0
    """What a good answer counts (kto)."""
    undesirable_weight: PositiveFloat = 1.0
    """What a bad answer counts (kto); the weights shall balance how many there are of each."""
    loss_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the loss."""
