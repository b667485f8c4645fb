"""Recipe sections about learning: LoRA adapters, optimizer, algorithm, critic, preference losses."""

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

from megarl.config.annotations import Decides, Foreign, ForeignValues, KeywordOf, OnlyIf
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
    REWARDS_TRAINED,
    SAMPLES,
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
OverlongBuffer = Annotated[
    PositiveInt | None,
    BeforeValidator(lambda given: None if given == 0 else given, json_schema_input_type=NonNegativeInt | None),
]
Kwargs = dict[str, bool | int | float | str | None]
"""Type of fields like algorithm.loss_kwargs: the keyword arguments of a formula that have no recipe field of their
own."""


# q, k and v are one linear layer in the trainer (gate and up too), so its adapter has one A.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused projections (qkv_proj, gate_up_proj), each with PEFT's names of the projections in it."""
_ALL_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_Target = Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
_WrittenTarget = _Target | Literal["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "all-linear"]
"""Names accepted in a recipe's lora.targets: fused projections, and PEFT's names for them."""


def fused_targets(given: Any) -> Any:
    """Return lora.targets with PEFT's names (q_proj) replaced by fused projections (qkv_proj).

    A value that is not a list is returned unchanged. Raises PydanticCustomError if only a part of a fused projection is
    named: the adapter would apply to all of it.
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

    rank: Annotated[NonNegativeInt,
        Decides(vllm="enable_lora max_loras max_lora_rank lora_dtype max_cpu_loras fully_sharded_loras "
            "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels"),
        Foreign("lora_rank lora_r lora_dim", example="32", short="r", verl="actor_rollout_ref.model.lora_rank"),
        Foreign(example="16", RL2="lora.rank"),
        Foreign(example="lora.rank=16 lora.alpha=32 lora.dropout=0.1", also="lora.alpha lora.dropout lora.targets",
            ColossalChat="--lora_config")] = 0  # fmt: skip
    """Rank of the LoRA adapters. 0 (default): no adapters, all weights are trained."""
    alpha: Annotated[PositiveFloat, OnlyIf(*LORA), Foreign("lora_alpha")] = 32.0
    """LoRA alpha: the adapters' output is scaled by alpha / rank."""
    dropout: Annotated[Decay, OnlyIf(*LORA), Foreign("lora_dropout linear_lora_dropout")] = 0.0
    """Dropout probability of the LoRA adapters' inputs during updates."""
    targets: Annotated[tuple[_Target, ...], Field(min_length=1), OnlyIf(*LORA), Decides(vllm="lora_target_modules"),
        BeforeValidator(
            fused_targets, json_schema_input_type=Literal["all-linear"] | tuple[_WrittenTarget, ...]),
        Foreign("lora_target_modules target_modules")] = (
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    )  # fmt: skip
    """Linear layers with LoRA adapters, in experts too. Fused projections (q, k, v or gate, up) share one A matrix.
    PEFT's names also work: q_proj, k_proj and v_proj together mean qkv_proj; gate_proj and up_proj together mean
    gate_up_proj; all-linear means all four."""
    sync: Annotated[Literal["merged", "adapter"], OnlyIf(*LORA, SAMPLES)] = "merged"
    """Weights sent to the engines by a reshard. merged (default): all weights, with the adapters merged in. adapter:
    the matrices A and B alone; the engines keep the base weights (megarl/reshard/README.md#lora)."""
    export_adapter: Annotated[bool, OnlyIf(*LORA)] = True
    """Also export the LoRA adapters alone, as a PEFT folder: adapter/ (or adapter_step_NNNNNN/), next to the merged
    model in hf/."""


class OptimizerConfig(Section):
    """Optimizer, learning-rate schedule and gradient clipping."""

    name: Literal["adam", "sgd"] = "adam"
    """Optimizer: adam (AdamW), or sgd without momentum (needs trainer.distributed_optimizer=false)."""
    learning_rate: Annotated[PositiveFloat,
        Foreign("optim.lr actor_learning_rate actor_lr max_lr", example="1e-6", ColossalChat="--lr", RL2="actor.lr",
            verl="actor_rollout_ref.actor.optim.lr", slime="--lr", ColossalRL="--learning-rate",
            TRL="learning_rate")] = 1e-6  # fmt: skip
    """Peak learning rate, reached after the warm-up."""
    schedule: Annotated[Literal["constant", "linear", "cosine", "wsd"],
        Foreign("lr_scheduler warmup_style", slime="--lr-decay-style", TRL="lr_scheduler_type"),
        ForeignValues(cosine="cosine_with_min_lr", constant="constant_with_warmup",
            linear="linear_with_warmup")] = "constant"  # fmt: skip
    """Learning-rate schedule after the warm-up. constant: the peak rate. linear, cosine: decay to min_learning_rate.
    wsd (warmup-stable-decay): constant, then a linear decay over the last decay steps."""
    decay_steps: Annotated[PositiveInt | None, OnlyIf(wsd)] = None
    """Number of optimizer steps of the final decay (schedule wsd). Default: a tenth of the run's steps."""
    warmup_steps: Annotated[NonNegativeInt, OnlyIf(no_warmup_ratio),
        Foreign("lr_warmup_steps lr_warmup_iters num_warmup_steps", note="in optimizer steps", example="10",
            verl="actor_rollout_ref.actor.optim.lr_warmup_steps")] = 0  # fmt: skip
    """Number of optimizer steps of the linear warm-up from zero to the peak learning rate."""
    warmup_ratio: Annotated[Annotated[float, Field(gt=0.0, lt=1.0)] | None,
        Foreign("lr_warmup_steps_ratio lr_warmup_ratio lr_warmup_fraction", example="0.05",
            verl="actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"),
        Foreign(example="0.1", TRL="warmup_ratio")] = None  # fmt: skip
    """Share of all optimizer steps used for the learning rate's linear warm-up. Use it instead of warmup_steps."""
    min_learning_rate: Annotated[NonNegativeFloat, OnlyIf(decays),
        Foreign("min_lr lr_min min_lr_ratio lr_end", note="not a ratio")] = 0.0  # fmt: skip
    """Final learning rate of a decaying schedule (linear, cosine, wsd)."""
    weight_decay: Annotated[NonNegativeFloat,
        Foreign("l2", example="0.01", ColossalRL="weight_decay", ColossalChat="--weight_decay",
            RL2="actor.weight_decay", verl="actor_rollout_ref.actor.optim.weight_decay")] = 0.0  # fmt: skip
    """Decoupled weight decay (AdamW) of matrices. Norms and biases are not decayed."""
    betas: Annotated[tuple[Decay, Decay], OnlyIf(adam),
        Foreign("adam_beta1 adam_betas", example="[0.9,0.98]", slime="--adam-beta2")] = (0.9, 0.95)  # fmt: skip
    """Adam's betas: decay rates of the first and second moment."""
    epsilon: Annotated[PositiveFloat, OnlyIf(adam), Foreign("adam_epsilon adam_eps eps")] = 1e-8
    """Adam's epsilon."""
    clip_grad_norm: Annotated[NonNegativeFloat,
        Foreign("clip_grad max_norm gradient_clipping", ColossalChat="--grad_clip", RL2="actor.max_grad_norm",
            TRL="max_grad_norm")] = 1.0  # fmt: skip
    """Clip the gradient to this global norm. 0: no clipping."""
    max_skipped_updates: NonNegativeInt = 3
    """Maximum number of consecutive updates skipped because the loss or the gradient is not finite. One more ends the
    run."""

    def warmup_updates(self, num_updates: int) -> int:
        """Return the number of linear warm-up steps in a run of `num_updates` optimizer steps, at most all of them."""
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
"""Values of `algorithm` fields by published method, for example dapo. A recipe selects one with algorithm.preset and
may override single fields."""

OVERLONG_PARTS = {"dapo": 5}
"""Presets that set algorithm.overlong_buffer, each with a divisor n: the buffer is max_new_tokens // n, at least 1
token."""


class AlgorithmConfig(Section):
    """RL algorithm: advantages, policy loss, KL penalty, importance correction, choice of groups."""

    preset: Annotated[
        Literal[
            "grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo", "cispo",
            "ppo"
        ] | None,
        Foreign("algorithm.algo algo algorithm.name", short="a"),
        ForeignValues(reinforce_plus_plus_baseline="reinforce_ppb reinforce++_baseline",
            reinforce_plus_plus="reinforce++")] = None  # fmt: skip
    """Published method, for example dapo. It sets the default values of other algorithm fields; values in the recipe
    replace them. Default: none. Values of each method: launch/recipes/README.md."""
    advantage: Annotated[str, OnlyIf(REWARDS_TRAINED),
        Formula("advantages", "ADVANTAGES", further=("gae",), measured=("lengths", "passes", "mask"), takes_own=True),
        Foreign("adv_estimator use_leave_one_out_baseline adv.estimator", verl="algorithm.adv_estimator",
            slime="--advantage-estimator"),
        ForeignValues(reinforce_plus_plus_baseline="reinforce_ppb reinforce++_baseline",
            reinforce_plus_plus="reinforce++", grpo="group_norm")] = "grpo"  # fmt: skip
    """Advantage estimator (default: grpo). gae trains a critic, as in PPO. All names: megarl/algorithms/advantages.py.
    For your own give its import path; launch/recipes/README.md shows the signature."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0), KeywordOf("algorithm.advantage")] = 1.0
    """Discount factor per token (advantage gae)."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0), KeywordOf("algorithm.advantage"),
        Foreign("lam lambd lamda gae.lambda", note="of orpo: preference.beta")] = 0.95  # fmt: skip
    """GAE lambda (advantage gae). 1: Monte-Carlo return minus the value. 0: one-step TD error."""
    # Where another sample of the group has fewer turns, the sample's whole return is compared with theirs. Rewards not
    # tied to a turn are scores of reward functions and of the reward model, KL and the length penalty.
    turn_discount: Annotated[Annotated[float, Field(ge=0.0, le=1.0)] | None, OnlyIf(REWARDS_TRAINED, *TURNS)] = None
    """Discount factor per turn: a turn's return is its own reward plus turn_discount times the next turn's return. Its
    baseline is the same turn of the group's other samples. Other rewards count at the last turn. Default: none, all
    tokens get the sum of all rewards. gae always rewards each turn at its last token, and discounts by gamma."""
    normalize_by_std: Annotated[bool, KeywordOf("algorithm.advantage"),
        Foreign("norm_adv_by_std_in_grpo grpo_std_normalization normalize_rewards norm_var", RL2="adv.norm_var",
            TRL="scale_rewards")] = True  # fmt: skip
    """Divide advantages by the group's standard deviation of rewards. true (default): as in GRPO. false: as in Dr.
    GRPO."""
    reward_order: Annotated[Literal["sum_then_normalize", "normalize_then_sum"],
        OnlyIf(REWARDS_TRAINED, GRPO, DEVIATION),
        Foreign(example="algorithm.reward_order=normalize_then_sum reward.functions=[boxed,format]",
            TRL="multi_objective_aggregation")] = "sum_then_normalize"  # fmt: skip
    """How the scores of several reward functions are combined into one advantage (grpo). sum_then_normalize: normalise
    their weighted sum within the group to mean 0, deviation 1. normalize_then_sum (GDPO): normalise each function's
    scores in the group, then their weighted sum over the step, so that no function dominates by its scale."""
    lone_sample: Annotated[Literal["zero", "reward"], KeywordOf("algorithm.advantage")] = "zero"
    """Advantage of a sample that is alone in its group (grpo, rloo, opo, reinforce_plus_plus_baseline). zero (default):
    0. reward: its reward, as in verl."""
    pass_k: Annotated[PositiveInt, KeywordOf("algorithm.advantage", "k")] = 4
    """k of the objective pass@k: a draw of k samples passes if at least one of them does (advantage pass_at_k)."""
    advantage_kwargs: Annotated[Kwargs, OnlyIf(REWARDS_TRAINED)] = Field(default_factory=dict)
    """Further keyword arguments of the advantage estimator, for example {epsilon: 1e-4} for grpo."""
    whiten_advantages: Annotated[bool, OnlyIf(REWARDS_TRAINED),
        Foreign("whiten_rewards normalize_advantages advantage_norm global_norm", example="true",
            RL2="adv.global_norm")] = False  # fmt: skip
    """Whiten advantages over all trained tokens of a step, to mean 0 and variance 1. In loop distillation only the
    rewards' part is whitened."""
    policy_loss: Annotated[str, OnlyIf(*ADVANTAGES), Formula("policy_losses", "POLICY_LOSSES", takes_own=True),
        Foreign("loss_fn.type policy_loss.loss_mode loss_mode importance_sampling_level"),
        Foreign("loss_type", note="of pairs of answers: preference.loss",
            also="algorithm.aggregation")] = "clipped"  # fmt: skip
    """Policy loss (default: clipped, as in PPO). All names: megarl/algorithms/policy_losses.py. For your own give its
    import path; launch/recipes/README.md shows the signature."""
    clip_low: Annotated[PositiveFloat, KeywordOf("algorithm.policy_loss"),
        Foreign("clip_ratio cliprange clip_eps clip_range", hint="Adam's epsilon is optimizer.epsilon",
            example="algorithm.clip_low=0.2 algorithm.clip_high=0.2", also="algorithm.clip_high", RL2="actor.clip",
            verl="actor_rollout_ref.actor.clip_ratio", slime="--eps-clip", TRL="epsilon", AReaL="actor.eps_clip"),
        Foreign("epsilon_low clip_ratio_low eps_clip_low ratio_clip_min", ColossalRL="clip_eps_low"),
        Foreign("eps_clip_low_high", also="algorithm.clip_high")] = 0.2  # fmt: skip
    """Lower clip range: the probability ratio is clipped at 1 - clip_low (policy_loss gmpo: the log-ratio at
    -clip_low)."""
    clip_high: Annotated[PositiveFloat, KeywordOf("algorithm.policy_loss"),
        Foreign("clip_ratio_high ratio_clip_max", example="0.28", ColossalRL="clip_eps_high",
            verl="actor_rollout_ref.actor.clip_ratio_high", slime="--eps-clip-high",
            TRL="epsilon_high")] = 0.2  # fmt: skip
    """Upper clip range: the probability ratio is clipped at 1 + clip_high. DAPO's clip-higher uses 0.28."""
    dual_clip: Annotated[Annotated[float, Field(gt=1.0)] | None, KeywordOf("algorithm.policy_loss"),
        Foreign("clip_ratio_c eps_clip_c ratio_clip_c dual_clip_c", example="10",
            verl="actor_rollout_ref.actor.clip_ratio_c")] = None  # fmt: skip
    """Constant c of dual-clip PPO: with a negative advantage, a token's loss is at most c * |advantage|. Default:
    none."""
    max_ratio: Annotated[Annotated[float, Field(gt=1.0)] | None, KeywordOf("algorithm.policy_loss"),
        Foreign(example="10", TRL="delta")] = None  # fmt: skip
    """Upper bound of the probability ratio, applied before clipping (ColossalChat uses 10). Default: none."""
    policy_loss_kwargs: Annotated[Kwargs, OnlyIf(*ADVANTAGES)] = Field(default_factory=dict)
    """Further keyword arguments of the policy loss, for example {temperature_negative: 1.1} for sapo."""
    skip_ratio: Annotated[Annotated[float, Field(gt=1.0)] | None, OnlyIf(*ADVANTAGES),
        Foreign(remark="ColossalRL's loss never reads it", example="20",
            ColossalRL="skip_threshold")] = None  # fmt: skip
    """Skip an update if its mean probability ratio over tokens is above this limit (ColossalRL's skip_threshold: 20).
    Default: never."""
    entropy_coefficient: Annotated[NonNegativeFloat,
        Foreign("entropy_coeff entropy_loss_coef entropy.coef", example="1e-4", RL2="actor.entropy.coef",
            verl="actor_rollout_ref.actor.entropy_coeff", slime="--entropy-coef")] = 0.0  # fmt: skip
    """Coefficient of the entropy bonus in the policy's loss."""
    # The entropies are those of the sampling distribution (temperature, top-p, top-k and min-p included).
    entropy_top_share: Annotated[Annotated[float, Field(gt=0.0, le=1.0)] | None,
        Foreign(remark="over the tokens of a step", example="0.2", TRL="top_entropy_quantile")] = None  # fmt: skip
    """Share of a step's trained tokens that get a policy loss: the ones with the highest entropy (Wang et al. 2025:
    0.2). Default: all tokens. Denominators, KL and entropy bonus still use all tokens. Needs old_logprobs trainer, to
    compute entropies before the update. Metrics: entropy/threshold, entropy/kept."""
    kl_coefficient: Annotated[NonNegativeFloat,
        Foreign(hint="of pairs of answers: preference.beta; Adam's: optimizer.betas", example="0.01", ColossalRL="beta",
            TRL="beta"),
        Foreign("kl_coef init_kl_coef kl_coeff kl_ctrl.kl_coef reference_policy_kl_penalty kl_beta", example="0.001",
            short="kl", RL2="kl.coef", verl="actor_rollout_ref.actor.kl_loss_coef",
            slime="--kl-loss-coef")] = 0.0  # fmt: skip
    """Coefficient of the KL penalty towards the reference model. 0 (default): no penalty, and no reference model is
    loaded."""
    kl_placement: Annotated[Literal["loss", "reward", "return", "advantage"], OnlyIf(KL),
        Foreign("use_kl_loss use_kl_in_reward", note="a coefficient above 0 switches it on",
            also="algorithm.kl_coefficient", verl="actor_rollout_ref.actor.use_kl_loss"),
        Foreign(example="reward", also="algorithm.kl_coefficient", verl="algorithm.use_kl_in_reward"),
        Foreign(note="reward or loss, as there", example="reward", RL2="kl.type")] = "loss"  # fmt: skip
    """Where the KL penalty is applied. loss (default): added to the loss. reward: subtracted from rewards, per token
    (gae) or per sample. return: subtracted from a token's advantage, summed from the token to the end (REINFORCE++).
    advantage: subtracted from a token's advantage."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3", "absolute"], OnlyIf(KL),
        Foreign("kl_penalty reference_policy_kl_type reward_estimator loss_estimator", RL2="kl.reward_estimator",
            slime="--kl-loss-type"),
        ForeignValues(k1="kl", k2="mse", k3="low_var_kl", absolute="abs")] = "k3"  # fmt: skip
    """Estimator of a token's KL: k1, k2, k3 (default) or absolute. Formulas: megarl/algorithms/kl.py."""
    # k3 grows exponentially with the log-ratio, so one token can dominate a step's penalty.
    k3_max: Annotated[PositiveFloat | None, OnlyIf(KL, one_of("algorithm.kl_estimator", "k3"))] = None
    """Upper bound of a token's KL by the estimator k3 (verl: 10). Default: none. Metric: kl/capped, the share of
    bounded tokens."""
    kl_target: Annotated[PositiveFloat | None, OnlyIf(KL),
        Foreign("target_kl kl_ctrl.target_kl", example="0.1", verl="algorithm.kl_ctrl.target_kl")] = None  # fmt: skip
    """Target of the adaptive KL controller, in nats per token. Default: none, kl_coefficient stays constant."""
    kl_horizon: Annotated[PositiveFloat, OnlyIf(KL, given("algorithm.kl_target")),
        Foreign("kl_ctrl.horizon horizon")] = 10000.0  # fmt: skip
    """Horizon n of the adaptive KL controller: after n samples the coefficient has changed by at most a fifth."""
    reference_update_steps: Annotated[PositiveInt | None, OnlyIf(*REFERENCE),
        Foreign("sync_ref_model ref_update_steps", example="64", slime="--ref-update-interval",
            TRL="ref_model_sync_steps")] = None  # fmt: skip
    """Number of steps between two updates of the reference model towards the policy (Gorbatovski et al. 2024), for the
    KL penalty or a preference loss. Default: the reference always is the initial model. Metric: kl/reference_moved."""
    reference_mixing: Annotated[float, Field(gt=0.0, le=1.0),
        OnlyIf(*REFERENCE, given("algorithm.reference_update_steps", "64")),
        Foreign(remark="1 unless given", example="0.6", TRL="ref_model_mixup_alpha")] = 1.0  # fmt: skip
    """Weight alpha of the policy in an updated reference model: alpha * policy + (1 - alpha) * reference, computed in
    model.dtype. 1: copy the policy. In bfloat16, rounding loses most of the change if alpha is below 0.01."""
    importance_sampling: Annotated[str | None, OnlyIf(*ADVANTAGES), Formula("importance", "IMPORTANCE_SAMPLING"),
        BeforeValidator(lambda given: None if given == "none" else given),
        Foreign("rollout_is use_importance_sampling_correction enable_vllm_is_correction",
            "vllm_importance_sampling_mode rollout_rs", example="tis", slime="--use-tis",
            TRL="vllm_importance_sampling_correction"),
        Foreign("tis_coef", note="tis, and its cap",
            example="algorithm.importance_sampling=tis algorithm.importance_sampling_high=2",
            also="algorithm.importance_sampling_high", RL2="actor.tis_coef"),
        Foreign("use_decoupled_loss", note="with old_logprobs trainer", example="tis",
            AReaL="actor.use_decoupled_loss")] = None  # fmt: skip
    """Importance-sampling correction for staleness, and for the difference of engine and trainer probabilities. With
    old_logprobs: trainer this is decoupled PPO. Default: none. With rollout.max_staleness above 0 the recipe must name
    a correction, or none. All names: megarl/algorithms/importance.py."""
    importance_sampling_low: Annotated[NonNegativeFloat, KeywordOf("algorithm.importance_sampling", "low"),
        Foreign("tis_clip_low vllm_importance_sampling_clip_min rollout_is_threshold_lower")] = 0.5  # fmt: skip
    """Lowest accepted ratio of trainer to engine probability. Tokens or sequences with a lower ratio are masked, so
    that they get no loss (importance_sampling icepop, rejection and masks). tis ignores this field."""
    importance_sampling_high: Annotated[PositiveFloat, KeywordOf("algorithm.importance_sampling", "high"),
        Foreign("tis_imp_ratio_cap tis_clip rollout_is_threshold vllm_importance_sampling_cap",
            "truncated_importance_sampling_ratio vllm_importance_sampling_clip_max")] = 2.0  # fmt: skip
    """Highest accepted ratio of trainer to engine probability. A higher ratio is truncated to this value
    (importance_sampling tis), or its token or sequence is masked, so that it gets no loss (icepop, rejection and
    masks)."""
    importance_sampling_kwargs: Annotated[Kwargs, OnlyIf(*ADVANTAGES, CORRECTION)] = Field(default_factory=dict)
    """Further keyword arguments of the importance-sampling correction."""
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length", "sample_level"],
        OnlyIf(TOKEN_LOSS),
        Foreign("loss_agg_mode token_level_loss loss_variation calculate_per_token_loss avg_level",
            remark="or sequence_mean_token_mean", RL2="actor.avg_level", verl="actor_rollout_ref.actor.loss_agg_mode"),
        ForeignValues(token_mean="token_level", sequence_mean_token_mean="seq_mean_token_mean",
            sequence_mean_token_sum="seq_mean_token_sum",
            constant_length="seq_mean_token_sum_norm")] = "token_mean"  # fmt: skip
    """How token losses are averaged over the global batch. Default: token_mean. All names:
    megarl/algorithms/reduction.py."""
    count_masked_sequences: Annotated[
        bool,
        OnlyIf(TOKEN_LOSS, SEQUENCE_MEAN),
    ] = False
    """Whether sequences without trained tokens (because of mask_truncated) count in the denominator if the loss is a
    mean over sequences. TRL counts them."""
    old_logprobs: Annotated[Literal["rollout", "trainer"], OnlyIf(*ADVANTAGES)] = "trainer"
    """Source of the old log-probs, the denominator of PPO's ratio. trainer (default): the trainer, in the first update
    itself, or in a pass before it where later updates or advantages need them. rollout: recorded by the engine. The
    metrics logprob_gap/ then come from a step's first update."""
    dynamic_sampling: Annotated[tuple[float, float] | None, OnlyIf(REWARDS_TRAINED),
        Foreign("filter_groups filter_groups.enable filter_groups.metric use_dynamic_sampling dynamic_filtering",
            "dynamic_filtering_reward_range", example="[0,1]", ColossalRL="filter_range",
            verl="algorithm.filter_groups.enable", slime="--dynamic-sampling-filter-path")] = None  # fmt: skip
    """Dynamic sampling (DAPO), [low, high]: train only groups whose accuracy is strictly between low and high; sample
    others instead. With dynamic_sampling_metric reward: train only groups with rewards differing by more than low.
    Default: train all groups."""
    dynamic_sampling_metric: Annotated[Literal["accuracy", "reward"] | None, OnlyIf(REWARDS_TRAINED, FILTER)] = None
    """Metric compared by dynamic_sampling. accuracy: share of right answers in a group. reward: largest minus smallest
    reward. Default: accuracy if every answer is judged right or wrong, by a reward function (judges_answer) or the
    environment; else reward."""
    max_attempts: Annotated[PositiveInt, OnlyIf(REWARDS_TRAINED, FILTER),
        Foreign("filter_groups.max_num_gen_batches max_num_gen_batches dynamic_sampling_max_gen_batches",
            verl="algorithm.filter_groups.max_num_gen_batches")] = 10  # fmt: skip
    """Maximum number of prompt batches sampled to fill one step (dynamic_sampling). If the step is still not full, the
    run ends."""
    oversampling: Annotated[float, Field(ge=1.0), OnlyIf(*SURPLUS),
        Foreign("gen_batch_size", note="over prompts a step",
            example="algorithm.dynamic_sampling=[0,1] algorithm.oversampling=2",
            slime="--over-sampling-batch-size")] = 1.0  # fmt: skip
    """Prompts started per prompt trained in a step. 1 (default): no surplus. With dynamic_sampling, surplus groups
    train in the next step. With rollout.stragglers park or abort, the first complete groups train, and that field
    decides about the others."""
    overlong_buffer: Annotated[OverlongBuffer, OnlyIf(REWARDS_TRAINED),
        Foreign("overlong_buffer overlong_buffer.len overlong_buffer.enable overlong_buffer_len",
            "overlong_buffer_length", note="in tokens", example="512",
            ColossalRL="soft_over_length_punishment cache_length",
            verl="reward_model.overlong_buffer.len")] = None  # fmt: skip
    """Length penalty (DAPO): in the last n tokens before max_new_tokens the reward falls linearly, by up to
    overlong_penalty * reward.correct_score. With several turns: in the longest turn, or before
    rollout.budget.sampled_tokens in all together. Default: 0, no penalty (preset dapo: a fifth of max_new_tokens).
    """
    overlong_penalty: Annotated[PositiveFloat, OnlyIf(REWARDS_TRAINED, given("algorithm.overlong_buffer", "512")),
        Foreign("overlong_buffer.penalty_factor overlong_buffer_penalty", remark="times reward.correct_score",
            verl="reward_model.overlong_buffer.penalty_factor")] = 1.0  # fmt: skip
    """Largest length penalty, at the end of the overlong_buffer, in units of reward.correct_score (verl:
    penalty_factor)."""
    mask_truncated: Annotated[bool, OnlyIf(ON_POLICY),
        Foreign("overlong_filtering", example="true", ColossalRL="filter_truncated_response",
            TRL="mask_truncated_completions")] = False  # fmt: skip
    """Exclude attempts from the loss if they end at a length or time limit (DAPO's overlong filtering)."""
    ptx_coefficient: Annotated[float, Field(ge=0.0, lt=1.0), OnlyIf(PTX),
        Foreign(example="data.ptx=talk.jsonl algorithm.ptx_coefficient=0.1",
            ColossalChat="--ptx_coef")] = 0.0  # fmt: skip
    """Coefficient c of PPO-ptx: the loss is (1 - c) * rl + c * (cross-entropy of the conversations in data.ptx). 0
    (default): none."""
    ptx_conversations: Annotated[PositiveInt, OnlyIf(given("data.ptx", "talk.jsonl")),
        Foreign(note="of a step",
            example="data.ptx=talk.jsonl algorithm.ptx_coefficient=0.1 algorithm.ptx_conversations=32",
            ColossalChat="--ptx_batch_size")] = 32  # fmt: skip
    """Number of conversations of data.ptx used per step (PPO-ptx)."""

    @property
    def correction_settings(self) -> dict[str, Any]:
        """Return the keyword arguments of the importance-sampling correction."""
        return {
            "low": self.importance_sampling_low,
            "high": self.importance_sampling_high,
            **self.importance_sampling_kwargs,
        }

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

    path: Annotated[str | None,
        Foreign("critic_pretrain value_model_path critic.model.path critic_load critic.model_name",
            example="models/critic", ColossalChat="--critic_checkpoint_path")] = None  # fmt: skip
    """Folder of the critic's initial weights: a Hugging Face language model, or a reward model with the policy's
    vocabulary. Default: model.path."""
    optimizer: Annotated[OptimizerConfig,
        Foreign("critic.optim.lr critic.optimizer.lr critic.lr critic_learning_rate", example="9e-6",
            inside="learning_rate", ColossalChat="--critic_lr")] = OptimizerConfig(learning_rate=5e-6)  # fmt: skip
    """Optimizer and learning-rate schedule of the critic."""
    clip: Annotated[PositiveFloat | None,
        Foreign("cliprange_value value_clip value_clip_range", example="0.5", RL2="critic.clip")] = 0.2  # fmt: skip
    """Clip range of the value loss: maximum distance of a value from its value before the update. null: no clipping."""
    warmup_steps: Annotated[NonNegativeInt,
        Foreign("critic_warmup freezing_actor_steps num_critic_only_steps freeze_steps", example="2",
            RL2="actor.freeze_steps")] = 0  # fmt: skip
    """Number of steps at the start in which only the critic is updated, not the policy (critic warm-up)."""
    updates_per_step: Annotated[PositiveInt, Foreign(example="8", RL2="critic.update_per_rollout")] = 1
    """Number of critic minibatches per step. Each is one optimizer update of the critic."""


class PreferenceConfig(Section):
    """Losses on pairs of chosen and rejected answers, or on single answers labelled good or bad (kto)."""

    loss: Annotated[str, Formula("preference_losses", "PREFERENCE_LOSSES", measured=("kl",)),
        Foreign("disable_reference_model", note="simpo and orpo load no reference model")] = "dpo"  # fmt: skip
    """Preference loss (default: dpo). dpo, ipo and kto load a reference model. kto takes single answers labelled good
    or bad instead of pairs. All names: megarl/algorithms/preference_losses.py."""
    beta: Annotated[PositiveFloat, KeywordOf("preference.loss")] = 0.1
    """Beta of the preference loss: strength of the KL constraint (dpo, ipo, kto), scale of the reward (simpo: 2), or
    weight of the odds ratio (orpo)."""
    margin: Annotated[NonNegativeFloat, OnlyIf(PAIRS, takes_margin), KeywordOf("preference.loss"),
        Foreign("simpo_gamma gamma_beta_ratio")] = 0.0  # fmt: skip
    """Target margin between the rewards of the chosen and the rejected answer (dpo; simpo: 1; loop reward_model)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5), KeywordOf("preference.loss")] = 0.0
    """Label smoothing: assumed probability that a pair's label is wrong (conservative dpo)."""
    normalize_by_length: Annotated[bool, KeywordOf("preference.loss"), Foreign("length_normalization")] = False
    """Average log-probs over an answer's tokens instead of summing them (dpo, ipo)."""
    desirable_weight: Annotated[PositiveFloat, KeywordOf("preference.loss"),
        Foreign("auto_weight", note="set by hand", also="preference.undesirable_weight")] = 1.0  # fmt: skip
    """Weight of desirable answers in the loss (kto)."""
    undesirable_weight: Annotated[PositiveFloat, KeywordOf("preference.loss")] = 1.0
    """Weight of undesirable answers in the loss (kto). Set both weights to balance unequal numbers of answers."""
    loss_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the preference loss."""
