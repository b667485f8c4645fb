"""Sections of a recipe about learning: adapters, optimizer, algorithm, critic, preference losses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
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
from megarl.files.import_path import is_import_path

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


def _formula(field: str, *, takes_own: bool = False) -> AfterValidator:
    """A name of the table of `megarl.algorithms` that belongs to a field, or the import path of the user's own."""

    def known(name: str) -> str:
        if name in formulas(field) or (takes_own and is_import_path(name)):
            return name
        own = "; your own as package.module:function or path/to/file.py:function" if takes_own else ""
        choices = either([repr(known) for known in formulas(field)])
        raise PydanticCustomError("formula", "must be {choices}{own}", {"choices": choices, "own": own})

    return AfterValidator(known)


Advantage = Annotated[str, _formula("algorithm.advantage", takes_own=True)]
PolicyLoss = Annotated[str, _formula("algorithm.policy_loss", takes_own=True)]
ImportanceSampling = Annotated[
    Annotated[str, _formula("algorithm.importance_sampling")] | None,
    BeforeValidator(lambda given: None if given == "none" else given),
]
OverlongBuffer = Annotated[PositiveInt | None, BeforeValidator(lambda given: None if given == 0 else given)]
Kwargs = dict[str, bool | int | float | str | None]
"""Keyword arguments of a formula, beside those that have a field of their own."""
PreferenceLoss = Annotated[str, _formula("preference.loss")]
Divergence = Annotated[str, _formula("distillation.divergence")]


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused projections by the projections that PEFT names one by one."""
_ALL_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def fused_targets(given: Any) -> Any:
    """Target modules with PEFT's names replaced by those of the fused projections; values of other kinds as they are.

    Raises PydanticCustomError for a part of a fused projection, whose adapter would be on all of it.
    """
    if given == "all-linear" or (isinstance(given, list | tuple) and list(given) == ["all-linear"]):
        return _ALL_LINEARS
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        return given
    names = list(dict.fromkeys(given))
    for fused, parts in _FUSED.items():
        named = [name for name in names if name in parts]
        if not named:
            continue
        if len(named) < len(parts):
            missing = [name for name in parts if name not in named]
            text = (
                f"has {', '.join(named)} without {', '.join(missing)}, which are one projection here with one A; name "
                f"all of {', '.join(parts)}, or none"
            )
            raise PydanticCustomError("part_of_a_projection", text)  # pyright: ignore[reportArgumentType]
        names = list(dict.fromkeys(fused if name in parts else name for name in names))
    return names


class LoraConfig(Section):
    rank: NonNegativeInt = 0
    """LoRA rank; 0: no adapters, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """LoRA alpha: the adapter's output is scaled by alpha / rank."""
    dropout: Decay = 0.0
    """Dropout probability of the adapters' inputs in updates."""
    targets: Annotated[
        tuple[Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ...],
        Field(min_length=1),
        BeforeValidator(fused_targets),
    ] = (
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    )
    """Target modules, those of experts included; fused projections share one A. PEFT's names too: q_proj, k_proj and
    v_proj together are qkv_proj, gate_proj and up_proj together gate_up_proj; all-linear: all of them."""
    export_adapter: bool = True
    """Write the adapters too, as a PEFT folder adapter/ (adapter_step_NNNNNN/) beside hf/, the merged model."""


class OptimizerConfig(Section):
    name: Literal["adam", "sgd"] = "adam"
    """Optimizer: AdamW, or SGD without momentum (needs trainer.distributed_optimizer false)."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule after the warm-up: constant, linear or cosine decay to `min_learning_rate`, or constant
    and then linear decay (wsd: warmup-stable-decay)."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps of the decay of a wsd schedule; default: a tenth of the run."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from zero."""
    warmup_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Optimizer steps of linear warm-up as a share of all, instead of `warmup_steps`."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Final learning rate of a decaying schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW) on matrices; norms and biases have none."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Adam's betas: decay rates of the first and second moment."""
    epsilon: PositiveFloat = 1e-8
    """Adam's epsilon."""
    clip_grad_norm: NonNegativeFloat = 1.0
    """Clip the gradient to this global norm; 0: no clipping."""
    max_skipped_updates: NonNegativeInt = 3
    """Consecutive updates that may be skipped because loss or gradient is not finite, before the run ends."""

    def warmup_updates(self, num_updates: int) -> int:
        """Optimizer steps of linear warm-up in a run of so many, at most all of them."""
        wanted = self.warmup_steps if self.warmup_ratio is None else round(self.warmup_ratio * num_updates)
        return min(wanted, num_updates)


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
    """Published method whose values these fields have where the recipe gives none."""
    advantage: Advantage = "grpo"
    """Advantage estimator of `algorithms.advantages`; gae trains a critic (PPO). Your own: its import path, and
    the form that README's "A loss or an advantage of your own" shows."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount factor gamma, per token (gae)."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """GAE lambda: 1 is the Monte-Carlo return minus the value, 0 the one-step TD error (gae)."""
    turn_discount: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Discount factor per turn, in environments of several turns: a turn's tokens have the return of that turn, its own
    reward plus turn_discount times the return of the next. It is compared with the same turn of the group's other
    samples, or where one of them has fewer turns, the sample's whole return with theirs. What is earned beside the
    rewards of turns (reward functions, reward model, KL, length penalty) counts at the last. None: all tokens of a
    sample have the sum of its rewards. Under gae rewards are discounted by gamma."""
    normalize_by_std: bool = True
    """Divide advantages by the standard deviation, as GRPO does; Dr. GRPO does not."""
    reward_order: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Order in which scores of several reward functions become an advantage (grpo): their weighted sum is brought to
    mean 0 and deviation 1 in the group, or each function's own scores are, and then their weighted sum over the step's
    samples (GDPO), so that no function's scale or spread drowns another's."""
    lone_sample: Literal["zero", "reward"] = "zero"
    """Advantage of a sample alone in its group (grpo, rloo, opo, reinforce_plus_plus_baseline): zero, for it is its own
    baseline, or its reward (verl)."""
    pass_k: PositiveInt = 4
    """k of pass@k: a draw of k samples passes if one of them does (pass_at_k)."""
    advantage_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the advantage estimator, such as {epsilon: 1e-4} of grpo."""
    whiten_advantages: bool = False
    """Whiten advantages over all trained tokens of a step: mean 0, variance 1."""
    policy_loss: PolicyLoss = "clipped"
    """Policy loss of `algorithms.policy_losses`. Your own: its import path, and the form that README's "A loss or an
    advantage of your own" shows."""
    clip_low: PositiveFloat = 0.2
    """Lower clip range: the ratio is clipped at 1 - clip_low (gmpo: the log-ratio at -clip_low)."""
    clip_high: PositiveFloat = 0.2
    """Upper clip range: the ratio is clipped at 1 + clip_high (DAPO's clip-higher: 0.28)."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Dual-clip constant c: for negative advantages the loss is at most c times their size."""
    max_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """Upper bound of the ratio before clipping (ColossalChat: 10)."""
    policy_loss_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the policy loss, such as {temperature_negative: 1.1} of sapo."""
    skip_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """Skip an update whose mean ratio over tokens is above this (ColossalRL's skip_threshold: 20)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    entropy_top_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of a step's trained tokens that have a policy loss, those of the highest entropy (Wang et al. 2025: 0.2);
    default: all. Denominators, KL and entropy bonus keep all tokens. The entropies are the sampling distribution's, by
    the trainer before the step's update; they need old_logprobs trainer. Metrics: entropy/threshold, entropy/kept."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty to the reference; 0: no reference model is loaded."""
    kl_placement: Literal["loss", "reward", "return", "advantage"] = "loss"
    """Placement of the KL penalty: in the loss; in the reward, per token (gae) or summed over the sample; in the
    return, summed from each token to the end and taken from its advantage (REINFORCE++); or per token in the
    advantage."""
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = "k3"
    """KL estimator per token (`algorithms.kl`)."""
    k3_max: PositiveFloat | None = None
    """Largest k3 estimate of a token (verl: 10); left out, it has no bound. `kl/capped`: the share of tokens held."""
    kl_target: PositiveFloat | None = None
    """Target KL in nats a token of the adaptive KL controller; default: a constant coefficient."""
    kl_horizon: PositiveFloat = 10000.0
    """Horizon of the adaptive KL controller: samples in which the coefficient changes by a fifth at most."""
    reference_update_steps: PositiveInt | None = None
    """Steps after which the reference, of the KL or of a preference loss, moves towards the policy (Gorbatovski et al.
    2024); default: it stays the model that training starts from. Metric: kl/reference_moved."""
    reference_mixing: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share alpha of the policy in the moved reference, alpha * policy + (1 - alpha) * reference, in model.dtype: 1 is
    the policy. In bfloat16 a share below 0.01 is mostly lost to rounding."""
    importance_sampling: ImportanceSampling = None
    """Importance-sampling correction from the weights that sampled to the trainer's before the update, of a gap between
    the two programs and of staleness (`algorithms.importance`); with old_logprobs trainer the decoupled objective of
    PPO. Default: none, which must be written where a stale group would go uncorrected (rollout.max_staleness)."""
    importance_sampling_low: NonNegativeFloat = 0.5
    """Lowest accepted ratio of trainer to engine (icepop, rejection, masks)."""
    importance_sampling_high: PositiveFloat = 2.0
    """Highest accepted ratio, or the cap of a truncated one (tis)."""
    importance_sampling_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the correction."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length", "sample_level"
    ] = "token_mean"
    """Aggregation of token losses over the global batch (`algorithms.reduction`)."""
    count_masked_sequences: bool = False
    """Count sequences without a trained token (mask_truncated) among those that a mean over sequences divides by, as
    TRL does."""
    old_logprobs: Literal["rollout", "trainer"] = "trainer"
    """Old log-probs, the ratio's denominator, of the weights that sampled: the engine's (rollout), or the trainer's,
    computed before the step's update where needed. With the engine's, `logprob_gap/` is of a step's first update."""
    dynamic_sampling: tuple[float, float] | None = None
    """Dynamic sampling (DAPO): train only on groups whose accuracy is strictly between these two, or whose rewards
    spread by more than the first (dynamic_sampling_metric); others are replaced."""
    dynamic_sampling_metric: Literal["accuracy", "reward"] | None = None
    """Metric of dynamic_sampling: accuracy, or reward, the largest less the smallest reward of the functions or the
    environment in a group. Default: accuracy where all answers of a group are judged (reward.functions judges_answer),
    else reward, so that continuous rewards work."""
    max_attempts: PositiveInt = 10
    """Batches of prompts that a step may sample to fill itself, before the run ends."""
    oversampling: Annotated[float, Field(ge=1.0)] = 1.0
    """Ratio of prompts sampled at once to prompts per step, with dynamic sampling, whose surplus groups train in the
    next step, or rollout.stragglers, which says what becomes of them."""
    overlong_buffer: OverlongBuffer = None
    """Last tokens of rollout.sampling.max_new_tokens over which the reward falls linearly, by overlong_penalty times
    reward.correct_score at the end (DAPO; the preset sets a fifth; 0: no punishment). With several turns the longest
    turn counts, and all turns together are compared with rollout.budget.sampled_tokens if it is set."""
    overlong_penalty: PositiveFloat = 1.0
    """Penalty at the end of the overlong_buffer, in units of reward.correct_score (verl's penalty_factor)."""
    mask_truncated: bool = False
    """Mask attempts that hit a limit of length or of time out of the loss (DAPO's overlong filtering)."""
    ptx_coefficient: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """PPO-ptx coefficient c: the loss is (1 - c) * rl + c * cross-entropy of the conversations of data.ptx."""
    ptx_conversations: PositiveInt = 32
    """Conversations of data.ptx per step."""

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
    """Hugging Face folder of the critic's initial weights: a language model, or a reward model with the policy's
    vocabulary; default: model.path."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
    """Optimizer and learning-rate schedule of the critic."""
    clip: PositiveFloat | None = 0.2
    """Value clip range: values move at most this far from the old ones in the clipped value loss; null: no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Critic warm-up: first steps in which only the critic is trained."""
    updates_per_step: PositiveInt = 1
    """Minibatches, one critic update each, that the samples of a step are split into."""


class PreferenceConfig(Section):
    loss: PreferenceLoss = "dpo"
    """Preference loss of `algorithms.preference_losses`; dpo, ipo and kto load a reference model, kto takes single
    answers instead of pairs."""
    beta: PositiveFloat = 0.1
    """Beta: strength of the KL constraint (dpo, ipo, kto), reward scale (simpo: 2), weight of the odds ratio (orpo)."""
    margin: NonNegativeFloat = 0.0
    """Target reward margin between chosen and rejected answer (dpo, simpo: 1; loop reward_model)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Label smoothing: probability that a pair's label is flipped (conservative dpo)."""
    normalize_by_length: bool = False
    """Average log-probs over tokens instead of summing them (dpo, ipo)."""
    desirable_weight: PositiveFloat = 1.0
    """Loss weight of desirable answers (kto)."""
    undesirable_weight: PositiveFloat = 1.0
    """Loss weight of undesirable answers (kto); choose both weights to balance the numbers of answers."""
    loss_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the loss."""
