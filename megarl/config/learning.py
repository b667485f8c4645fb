"""Recipe sections about learning: adapters, optimizer, algorithm, critic, preference losses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
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

from megarl.config.annotations import KeywordOf, OnlyIf
from megarl.config.conditions import (
    ADVANTAGES,
    CORRECTION,
    DEVIATION,
    FILTER,
    GRPO,
    KL,
    LORA,
    ON_POLICY,
    PAIRS,
    PTX,
    REFERENCE,
    SEQUENCE_MEAN,
    SURPLUS,
    TOKEN_LOSS,
    TURNS,
    adam,
    decays,
    given,
    no_warmup_ratio,
    one_of,
    takes_margin,
    wsd,
)
from megarl.config.formulas import Formula
from megarl.config.section import Section

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


# 0 switches off the preset's value. An absent field would take that value.
OverlongBuffer = Annotated[PositiveInt | None, BeforeValidator(lambda given: None if given == 0 else given)]
Kwargs = dict[str, bool | int | float | str | None]
"""Keyword arguments of a formula without a recipe field of their own."""


# q, k and v are one linear layer in the trainer (gate and up too), so its adapter has one A.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused projections, each with the projections that PEFT names separately."""
_ALL_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def fused_targets(given: Any) -> Any:
    """Return target modules with PEFT's names replaced by fused projections. Other types are returned unchanged.

    Raises PydanticCustomError for a part of a fused projection: its adapter would apply to the whole projection.
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
                f"has {', '.join(named)} without {', '.join(missing)}, but they form one projection with one A here; "
                f"name all of {', '.join(parts)}, or none"
            )
            raise PydanticCustomError("part_of_a_projection", text)  # pyright: ignore[reportArgumentType]
        names = list(dict.fromkeys(fused if name in parts else name for name in names))
    return names


class LoraConfig(Section):
    """LoRA adapters: rank, scaling and target modules."""

    rank: NonNegativeInt = 0
    """LoRA rank. 0 (default): no adapters, all weights are trained."""
    alpha: Annotated[PositiveFloat, OnlyIf(*LORA)] = 32.0
    """LoRA alpha: the adapter's output is scaled by alpha / rank."""
    dropout: Annotated[Decay, OnlyIf(*LORA)] = 0.0
    """Dropout probability of the adapters' inputs in updates."""
    targets: Annotated[
        tuple[Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ...],
        Field(min_length=1),
        BeforeValidator(fused_targets),
        OnlyIf(*LORA),
    ] = (
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    )
    """Target modules, in experts too. A fused projection has one A matrix. PEFT's names also work: q_proj, k_proj and
    v_proj together mean qkv_proj; gate_proj and up_proj together mean gate_up_proj; all-linear means all four."""
    export_adapter: Annotated[bool, OnlyIf(*LORA)] = True
    """Also export the adapters as a PEFT folder: adapter/ (or adapter_step_NNNNNN/), next to the merged model in
    hf/."""


class OptimizerConfig(Section):
    """Optimizer, learning-rate schedule and gradient clipping."""

    name: Literal["adam", "sgd"] = "adam"
    """Optimizer: adam (AdamW), or sgd without momentum (needs trainer.distributed_optimizer=false)."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule after the warm-up. constant; linear or cosine: decay to `min_learning_rate`; wsd
    (warmup-stable-decay): constant, then linear decay."""
    decay_steps: Annotated[PositiveInt | None, OnlyIf(wsd)] = None
    """Optimizer steps of the decay (schedule wsd). Default: a tenth of the run."""
    warmup_steps: Annotated[NonNegativeInt, OnlyIf(no_warmup_ratio)] = 0
    """Optimizer steps of linear warm-up from zero."""
    warmup_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of all optimizer steps used for linear warm-up. Replaces `warmup_steps`."""
    min_learning_rate: Annotated[NonNegativeFloat, OnlyIf(decays)] = 0.0
    """Final learning rate of a decaying schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW) of matrices. Norms and biases are not decayed."""
    betas: Annotated[tuple[Decay, Decay], OnlyIf(adam)] = (0.9, 0.95)
    """Adam's betas: decay rates of the first and second moment."""
    epsilon: Annotated[PositiveFloat, OnlyIf(adam)] = 1e-8
    """Adam's epsilon."""
    clip_grad_norm: NonNegativeFloat = 1.0
    """Clip the gradient to this global norm. 0: no clipping."""
    max_skipped_updates: NonNegativeInt = 3
    """Limit of consecutive skipped updates, due to a loss or gradient that is not finite. More end the run."""

    def warmup_updates(self, num_updates: int) -> int:
        """Return the optimizer steps of linear warm-up in a run of `num_updates` steps, at most all of them."""
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
    # The ratio of a sequence is a mean over its tokens and stays close to 1, hence the narrow clip range.
    "gspo": {
        "advantage": "grpo", "policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
    },
    # clip_low 1 puts the lower bound at ratio 0, so only large ratios are clipped.
    "cispo": {"advantage": "grpo", "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 2.0},
    "ppo": {
        "advantage": "gae", "whiten_advantages": True, "kl_coefficient": 0.001, "kl_placement": "reward",
        "kl_estimator": "k1",
    },
}  # fmt: skip
"""Values of `algorithm` fields by published method. A recipe names one and may override single fields."""

OVERLONG_PARTS = {"dapo": 5}
"""Presets with an `overlong_buffer`, each with a divisor n: the buffer is max_new_tokens // n, at least 1."""


class AlgorithmConfig(Section):
    """RL algorithm: advantages, policy loss, KL penalty, corrections and the choice of groups."""

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
    """Published method. Its values replace the defaults of fields missing in the recipe. Default: none."""
    advantage: Annotated[
        str,
        Formula("advantages", "ADVANTAGES", further=("gae",), measured=("lengths", "passes", "mask"), takes_own=True),
    ] = "grpo"
    """Advantage estimator, a name of `algorithms.advantages` (default: grpo). gae trains a critic (PPO). For your own
    give its import path; README's "A loss or an advantage of your own" shows the signature."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0), KeywordOf("algorithm.advantage")] = 1.0
    """Discount factor per token (advantage gae)."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0), KeywordOf("algorithm.advantage")] = 0.95
    """GAE lambda (advantage gae). 1: Monte-Carlo return minus the value. 0: one-step TD error."""
    # Where another sample of the group has fewer turns, the sample's whole return is compared with theirs. Rewards not
    # tied to a turn are scores of reward functions and of the reward model, KL and the length penalty.
    turn_discount: Annotated[Annotated[float, Field(ge=0.0, le=1.0)] | None, OnlyIf(*TURNS)] = None
    """Discount factor per turn: a turn's tokens get its own reward plus turn_discount times the next turn's return.
    Baseline: the same turn of the group's other samples. Rewards not tied to a turn count at the last turn. Default:
    none, all tokens get the sum of all rewards. gae discounts by gamma instead."""
    normalize_by_std: Annotated[bool, KeywordOf("algorithm.advantage")] = True
    """Divide advantages by the standard deviation: true as in GRPO (default), false as in Dr. GRPO."""
    reward_order: Annotated[
        Literal["sum_then_normalize", "normalize_then_sum"],
        OnlyIf(GRPO, DEVIATION),
    ] = "sum_then_normalize"
    """How several reward functions become one advantage (grpo). sum_then_normalize: normalise their weighted sum in the
    group (mean 0, deviation 1). normalize_then_sum (GDPO): normalise each function's scores, then their weighted sum
    over the step's samples. Then no function's scale or spread hides another's."""
    lone_sample: Annotated[Literal["zero", "reward"], KeywordOf("algorithm.advantage")] = "zero"
    """Advantage of the only sample in a group (grpo, rloo, opo, reinforce_plus_plus_baseline). zero (default): the
    sample is its own baseline. reward: its reward, as in verl."""
    pass_k: Annotated[PositiveInt, KeywordOf("algorithm.advantage", "k")] = 4
    """k of pass@k: a draw of k samples passes if at least one does (advantage pass_at_k)."""
    advantage_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the advantage estimator, for example {epsilon: 1e-4} for grpo."""
    whiten_advantages: bool = False
    """Whiten advantages over all trained tokens of a step: mean 0, variance 1."""
    policy_loss: Annotated[str, OnlyIf(*ADVANTAGES), Formula("policy_losses", "POLICY_LOSSES", takes_own=True)] = (
        "clipped"
    )
    """Policy loss, a name of `algorithms.policy_losses` (default: clipped). For your own give its import path; README's
    "A loss or an advantage of your own" shows the signature."""
    clip_low: Annotated[PositiveFloat, KeywordOf("algorithm.policy_loss")] = 0.2
    """Lower clip range: the ratio is clipped at 1 - clip_low (gmpo: the log-ratio at -clip_low)."""
    clip_high: Annotated[PositiveFloat, KeywordOf("algorithm.policy_loss")] = 0.2
    """Upper clip range: the ratio is clipped at 1 + clip_high (DAPO's clip-higher: 0.28)."""
    dual_clip: Annotated[Annotated[float, Field(gt=1.0)] | None, KeywordOf("algorithm.policy_loss")] = None
    """Dual-clip constant c: for negative advantages the loss is at most c * |advantage|. Default: none."""
    max_ratio: Annotated[Annotated[float, Field(gt=1.0)] | None, KeywordOf("algorithm.policy_loss")] = None
    """Upper bound of the ratio before clipping (ColossalChat: 10). Default: none."""
    policy_loss_kwargs: Annotated[Kwargs, OnlyIf(*ADVANTAGES)] = Field(default_factory=dict)
    """Further keyword arguments of the policy loss, for example {temperature_negative: 1.1} for sapo."""
    skip_ratio: Annotated[Annotated[float, Field(gt=1.0)] | None, OnlyIf(*ADVANTAGES)] = None
    """Skip an update if its mean ratio over tokens is above this (ColossalRL's skip_threshold: 20). Default: never."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    # The entropies are those of the sampling distribution (temperature, top-p, top-k and min-p included).
    entropy_top_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of a step's trained tokens with a policy loss: the highest-entropy ones (Wang et al. 2025: 0.2). Default:
    all. Denominators, KL and entropy bonus keep all tokens. Needs old_logprobs trainer, to compute entropies before the
    update. Metrics: entropy/threshold, entropy/kept."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty to the reference. 0 (default): no reference model is loaded."""
    kl_placement: Annotated[Literal["loss", "reward", "return", "advantage"], OnlyIf(KL)] = "loss"
    """Where the KL penalty is applied. loss (default); reward: per token (gae) or summed over the sample; return:
    summed from each token to the end and subtracted from its advantage (REINFORCE++); advantage: per token."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3", "absolute"], OnlyIf(KL)] = "k3"
    """KL estimator per token: k1, k2, k3 (default) or absolute (`algorithms.kl`)."""
    # k3 grows exponentially with the log-ratio, so one token can dominate a step's penalty.
    k3_max: Annotated[PositiveFloat | None, OnlyIf(KL, one_of("algorithm.kl_estimator", "k3"))] = None
    """Upper bound of a token's k3 estimate (verl: 10). Default: none. Metric: kl/capped, the share of capped tokens."""
    kl_target: Annotated[PositiveFloat | None, OnlyIf(KL)] = None
    """Target KL of the adaptive KL controller, in nats per token. Default: none, the coefficient is constant."""
    kl_horizon: Annotated[PositiveFloat, OnlyIf(KL, given("algorithm.kl_target"))] = 10000.0
    """Horizon of the adaptive KL controller: n samples change the coefficient by at most a fifth."""
    reference_update_steps: Annotated[PositiveInt | None, OnlyIf(*REFERENCE)] = None
    """Steps between updates of the reference model towards the policy (Gorbatovski et al. 2024), for the KL or a
    preference loss. Default: the reference stays the initial model. Metric: kl/reference_moved."""
    reference_mixing: Annotated[
        float, Field(gt=0.0, le=1.0), OnlyIf(*REFERENCE, given("algorithm.reference_update_steps"))
    ] = 1.0
    """Weight alpha of the policy in an updated reference, alpha * policy + (1 - alpha) * reference, in model.dtype. 1:
    copy the policy. In bfloat16 rounding loses most of a weight below 0.01."""
    importance_sampling: Annotated[
        str | None,
        OnlyIf(*ADVANTAGES),
        Formula("importance", "IMPORTANCE_SAMPLING"),
        BeforeValidator(lambda given: None if given == "none" else given),
    ] = None
    """Importance-sampling correction from the sampling weights to the trainer's, for the engine's mismatch and
    staleness (`algorithms.importance`). With old_logprobs trainer it is PPO's decoupled objective. Default: none; a
    stale group needs a correction or an explicit none (rollout.max_staleness)."""
    importance_sampling_low: Annotated[NonNegativeFloat, KeywordOf("algorithm.importance_sampling", "low")] = 0.5
    """Lowest accepted ratio of trainer to engine probability (icepop, rejection, masks)."""
    importance_sampling_high: Annotated[PositiveFloat, KeywordOf("algorithm.importance_sampling", "high")] = 2.0
    """Highest accepted ratio of trainer to engine probability, or the cap of a truncated one (tis)."""
    importance_sampling_kwargs: Annotated[Kwargs, OnlyIf(*ADVANTAGES, CORRECTION)] = Field(default_factory=dict)
    """Further keyword arguments of the importance-sampling correction."""
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length", "sample_level"],
        OnlyIf(TOKEN_LOSS),
    ] = "token_mean"
    """How token losses are averaged over the global batch (`algorithms.reduction`). Default: token_mean."""
    count_masked_sequences: Annotated[
        bool,
        OnlyIf(TOKEN_LOSS, SEQUENCE_MEAN),
    ] = False
    """Count sequences without trained tokens (mask_truncated) in the denominator of a mean over sequences, as TRL
    does."""
    old_logprobs: Annotated[Literal["rollout", "trainer"], OnlyIf(*ADVANTAGES)] = "trainer"
    """Source of the old log-probs, the ratio's denominator. rollout: the engine's. trainer (default): recomputed before
    the step's update where needed. With rollout, `logprob_gap/` is measured at a step's first update."""
    dynamic_sampling: tuple[float, float] | None = None
    """Dynamic sampling (DAPO), [low, high]: replace groups unless their accuracy is strictly between low and high, or
    their rewards spread by more than low (dynamic_sampling_metric). Default: train on all groups."""
    dynamic_sampling_metric: Annotated[Literal["accuracy", "reward"] | None, OnlyIf(FILTER)] = None
    """Metric compared by dynamic_sampling. accuracy: share of correct answers. reward: largest minus smallest reward of
    a group (of functions or environment). Default: accuracy if a function (judges_answer) or the environment decides
    for every answer whether it is correct, else reward, for continuous rewards."""
    max_attempts: Annotated[PositiveInt, OnlyIf(FILTER)] = 10
    """Limit of prompt batches sampled to fill one step. Beyond it the run ends."""
    oversampling: Annotated[float, Field(ge=1.0), OnlyIf(*SURPLUS)] = 1.0
    """Ratio of started prompts to trained prompts per step. With dynamic_sampling the surplus trains in the next step.
    With rollout.stragglers that field decides about the surplus. Default: 1, none."""
    overlong_buffer: OverlongBuffer = None
    """Length in tokens of the penalised end of max_new_tokens (DAPO). There the reward falls linearly, at the end by
    overlong_penalty * reward.correct_score. Several turns: the longest counts, and their sum against
    rollout.budget.sampled_tokens. Default: preset dapo a fifth, else none. 0: none."""
    overlong_penalty: Annotated[PositiveFloat, OnlyIf(given("algorithm.overlong_buffer"))] = 1.0
    """Penalty at the end of the overlong_buffer, in units of reward.correct_score (verl's penalty_factor)."""
    mask_truncated: Annotated[bool, OnlyIf(ON_POLICY)] = False
    """Exclude attempts from the loss if they hit a length or time limit (DAPO's overlong filtering)."""
    ptx_coefficient: Annotated[float, Field(ge=0.0, lt=1.0), OnlyIf(PTX)] = 0.0
    """PPO-ptx coefficient c: the loss is (1 - c) * rl + c * cross-entropy of data.ptx. 0 (default): none."""
    ptx_conversations: Annotated[PositiveInt, OnlyIf(given("data.ptx"))] = 32
    """Conversations of data.ptx per step."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        preset = given.get("preset") if isinstance(given, dict) else None
        if not isinstance(preset, str):
            return validate(given)
        # The user's values come last, so they win over the preset's.
        made = validate(PRESETS.get(preset, {}) | given)
        # Only the user's own fields stay in model_fields_set. A field set there must have an effect
        # (`config.effects`), but a preset's value may have none.
        made.model_fields_set.intersection_update(given)
        return made


class CriticConfig(Section):
    """Critic of PPO: initial weights, optimizer, warm-up."""

    path: str | None = None
    """Hugging Face folder of the critic's initial weights: a language model, or a reward model with the policy's
    vocabulary. Default: model.path."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
    """Optimizer and learning-rate schedule of the critic."""
    clip: PositiveFloat | None = 0.2
    """Value clip range: the clipped value loss limits the change from the old values to this. null: no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Critic warm-up: number of first steps with critic updates only."""
    updates_per_step: PositiveInt = 1
    """Minibatches per step for the critic. Each is one critic update."""


class PreferenceConfig(Section):
    """Losses on pairs of a chosen and a rejected answer, or on single judged answers (kto)."""

    loss: Annotated[str, Formula("preference_losses", "PREFERENCE_LOSSES", measured=("kl",))] = "dpo"
    """Preference loss of `algorithms.preference_losses` (default: dpo). dpo, ipo and kto load a reference model. kto
    takes single answers instead of pairs."""
    beta: Annotated[PositiveFloat, KeywordOf("preference.loss")] = 0.1
    """Beta: KL constraint strength (dpo, ipo, kto), reward scale (simpo: 2), or odds-ratio weight (orpo)."""
    margin: Annotated[NonNegativeFloat, OnlyIf(PAIRS, takes_margin), KeywordOf("preference.loss")] = 0.0
    """Target reward margin between the chosen and the rejected answer (dpo; simpo: 1; loop reward_model)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5), KeywordOf("preference.loss")] = 0.0
    """Label smoothing: probability of a flipped label of a pair (conservative dpo)."""
    normalize_by_length: Annotated[bool, KeywordOf("preference.loss")] = False
    """Average log-probs over tokens instead of summing them (dpo, ipo)."""
    desirable_weight: Annotated[PositiveFloat, KeywordOf("preference.loss")] = 1.0
    """Loss weight of desirable answers (kto)."""
    undesirable_weight: Annotated[PositiveFloat, KeywordOf("preference.loss")] = 1.0
    """Loss weight of undesirable answers (kto). Use both weights to balance unequal numbers of answers."""
    loss_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the preference loss."""
