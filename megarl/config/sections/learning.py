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

from megarl.config.annotations import Decides, KeywordOf, OnlyIf, UntriedOnGpu
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
    STATES,
    SURPLUS,
    TOKEN_LOSS,
    TURNS,
    adam,
    decays,
    muon,
    no_warmup_ratio,
    non_empty,
    one_of,
    takes_margin,
    wsd,
)
from megarl.config.formulas import Formula
from megarl.config.section import Section

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


# 0 disables the preset's buffer. An absent field would have the preset's value.
OverlongBuffer = Annotated[
    PositiveInt | None,
    BeforeValidator(lambda value: None if value == 0 else value, json_schema_input_type=NonNegativeInt | None),
]
Kwargs = dict[str, bool | int | float | str | None]
"""Type of fields like preference.loss_kwargs: keyword arguments of a formula without a recipe field of their own."""


# The trainer has one linear layer for q, k and v, and one for gate and up. Each has one adapter with one matrix A.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused projections, each with PEFT's names of its parts."""
_ALL_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_Target = Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
_WrittenTarget = _Target | Literal["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "all-linear"]
"""Names accepted by lora.targets: fused projections, and PEFT's names."""


def fused_targets(targets: Any) -> Any:
    """Return lora.targets with PEFT's names (q_proj) replaced by fused projections (qkv_proj).

    A value that is not a list is unchanged. Raises PydanticCustomError if only a part of a fused projection is named:
    the adapter would apply to the whole.
    """
    if targets == "all-linear" or (isinstance(targets, list | tuple) and list(targets) == ["all-linear"]):
        return _ALL_LINEARS
    if not isinstance(targets, list | tuple) or not all(isinstance(name, str) for name in targets):
        return targets
    names = list(dict.fromkeys(targets))
    for fused_name, part_names in _FUSED.items():
        named_parts = [name for name in names if name in part_names]
        if not named_parts:
            continue
        if len(named_parts) < len(part_names):
            missing_parts = [name for name in part_names if name not in named_parts]
            text = (
                f"has {', '.join(named_parts)} without {', '.join(missing_parts)}, but they form one projection with "
                f"one factor A here; name all of {', '.join(part_names)}, or none"
            )
            raise PydanticCustomError("part_of_a_projection", text)  # pyright: ignore[reportArgumentType]
        names = list(dict.fromkeys(fused_name if name in part_names else name for name in names))
    return names


class LoraConfig(Section):
    """LoRA adapters: rank, scaling and target modules."""

    rank: Annotated[
        NonNegativeInt,
        UntriedOnGpu("1 and more"),
        Decides(
            vllm="enable_lora max_loras max_lora_rank lora_dtype max_cpu_loras fully_sharded_loras "
            "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels"
        ),
    ] = 0
    """Rank of the LoRA adapters. 0 (default): no adapters, all weights are trained."""
    alpha: Annotated[PositiveFloat, OnlyIf(*LORA)] = 32.0
    """LoRA alpha: the adapters' output is scaled by alpha / rank."""
    rank_stabilised: Annotated[bool, OnlyIf(*LORA)] = False
    """Scale the adapters' output by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732; PEFT: use_rslora), so that
    high ranks learn as fast as low ones. Default: false."""
    dropout: Annotated[Decay, OnlyIf(*LORA)] = 0.0
    """Dropout probability of the LoRA adapters' inputs during updates."""
    targets: Annotated[
        tuple[_Target, ...],
        Field(min_length=1),
        OnlyIf(*LORA),
        Decides(vllm="lora_target_modules"),
        BeforeValidator(fused_targets, json_schema_input_type=Literal["all-linear"] | tuple[_WrittenTarget, ...]),
    ] = (
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    )
    """Linear layers with LoRA adapters, also in experts. Default: all four. Fused projections (q, k, v or gate, up)
    share one A matrix. PEFT's names: q_proj, k_proj and v_proj together mean qkv_proj; gate_proj and up_proj together
    mean gate_up_proj; all-linear means all four."""
    sync: Annotated[Literal["auto", "merged", "adapter"], OnlyIf(*LORA, SAMPLES)] = "auto"
    """Weights sent to the engines after an update. adapter: only the matrices A and B; base weights stay. merged: all
    weights with the adapters merged in; in bfloat16, rounding removes small updates. auto (default): adapter if the
    engines support it, else merged with a notice (megarl/reshard/README.md#lora)."""
    export_adapter: Annotated[bool, OnlyIf(*LORA)] = True
    """Also export the LoRA adapters alone, as a PEFT folder: adapter/ (or adapter_step_NNNNNN/), next to the merged
    model in hf/. Default: true."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


class MuonConfig(Section):
    """Muon (optimizer.name=muon): orthogonalised momentum of matrices (Jordan et al. 2024; arXiv 2502.16982)."""

    momentum: Annotated[Decay, OnlyIf(muon)] = 0.95
    """Decay rate of the momentum."""
    nesterov: Annotated[bool, OnlyIf(muon)] = False
    """Nesterov momentum: add the newest gradient once more before the momentum is orthogonalised. Default: false."""
    coefficients: Annotated[Literal["quintic", "simple", "polar_express", "deepseek_v4"], OnlyIf(muon)] = "quintic"
    """Newton-Schulz polynomials that orthogonalise. quintic (default): five of You Jiacheng. simple: five times that of
    Jordan et al. polar_express: arXiv 2505.16932. deepseek_v4: ten iterations, nearly exact."""
    scale: Annotated[Literal["spectral", "shape", "unit_rms"], OnlyIf(muon)] = "spectral"
    """Factor of an update by its matrix's shape [out, in]. spectral (default): sqrt(max(out, in)), arXiv 2502.16982.
    shape: sqrt(max(1, out/in)), Jordan et al. unit_rms: sqrt(out/in)."""
    scale_factor: Annotated[PositiveFloat, OnlyIf(muon)] = 0.2
    """Further factor of an update. 0.2 (default) with scale spectral: updates as large as Adam's in a long run (arXiv
    2502.16982). verl: 1, with adam_rate 0.229."""
    adam_rate: Annotated[PositiveFloat, OnlyIf(muon)] = 1.0
    """Learning rate of the parameters updated by Adam (embedding, head, router, norms, biases), as a multiple of
    learning_rate."""
    products: Annotated[Literal["bfloat16", "float32"], OnlyIf(muon)] = "bfloat16"
    """Number type of the Newton-Schulz products. bfloat16 (default) is faster on GPUs, float32 more precise."""


class OptimizerConfig(Section):
    """Optimizer, learning-rate schedule and gradient clipping."""

    name: Annotated[Literal["adam", "sgd", "muon"], UntriedOnGpu("muon")] = "adam"
    """Optimizer. adam (default): AdamW. muon: Muon for matrices, AdamW for other parameters
    (megarl/training/README.md#muon). sgd: no momentum (needs trainer.distributed_optimizer=false)."""
    muon: MuonConfig = MuonConfig()
    """Settings of Muon."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate, reached after the warm-up."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule after the warm-up. constant: the peak rate. linear, cosine: decay to min_learning_rate.
    wsd (warmup-stable-decay): constant, then a linear decay over the last decay steps."""
    decay_steps: Annotated[PositiveInt | None, OnlyIf(wsd)] = None
    """Number of optimizer steps of the final decay (schedule wsd), at most the steps after the warm-up. Default: a
    tenth of the run's steps."""
    warmup_steps: Annotated[NonNegativeInt, OnlyIf(no_warmup_ratio)] = 0
    """Number of optimizer steps of the linear warm-up from zero to the peak learning rate."""
    warmup_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Length of the linear warm-up as a share of all optimizer steps, instead of warmup_steps."""
    min_learning_rate: Annotated[NonNegativeFloat, OnlyIf(decays)] = 0.0
    """Final learning rate of a decaying schedule (linear, cosine, wsd)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW) of matrices; norms and biases are not decayed. Default: 0."""
    betas: Annotated[tuple[Decay, Decay], OnlyIf(adam)] = (0.9, 0.95)
    """Adam's betas: decay rates of the first and second moment."""
    epsilon: Annotated[PositiveFloat, OnlyIf(adam)] = 1e-8
    """Adam's epsilon."""
    clip_grad_norm: NonNegativeFloat = 1.0
    """Clip the gradient to this global norm. 0: no clipping."""
    max_skipped_updates: NonNegativeInt = 3
    """Maximum number of consecutive updates skipped because loss or gradient are not finite. One more ends the run."""

    def warmup_updates(self, num_updates: int) -> int:
        warmup = self.warmup_steps if self.warmup_ratio is None else round(self.warmup_ratio * num_updates)
        return min(warmup, num_updates)


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
    # LUSPO sums over a sequence's tokens, so that a long sequence weighs more, in proportion to its length.
    "luspo": {
        "advantage": "grpo", "policy_loss": "gspo", "clip_low": 2e-3, "clip_high": 2.5e-3,
        "aggregation": "sequence_mean_token_sum",
    },
    "gigpo": {
        "advantage": "grpo", "normalize_by_std": False, "state_weight": 1.0, "state_discount": 0.95,
    },
    # These three losses have the ratio to the engine's log-probs, which also corrects staleness and rounding.
    "dppo_tv": {
        "advantage": "grpo", "policy_loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "old_logprobs": "rollout",
    },
    "dppo_kl": {
        "advantage": "grpo", "policy_loss": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05, "old_logprobs": "rollout",
    },
    "vespo": {"advantage": "grpo", "policy_loss": "vespo", "old_logprobs": "rollout"},
    "clip_cov": {"advantage": "grpo", "clip_cov_share": 2e-4},
    # The penalty replaces the clip.
    "kl_cov": {"advantage": "grpo", "policy_loss": "unclipped", "kl_cov_share": 2e-4},
    # clip_low 1 puts the lower bound at ratio 0, so only large ratios are clipped.
    "cispo": {"advantage": "grpo", "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 2.0},
    "ppo": {
        "advantage": "gae", "whiten_advantages": True, "kl_coefficient": 0.001, "kl_placement": "reward",
        "kl_estimator": "k1",
    },
}  # fmt: skip
"""Values of `algorithm` fields by published method, for example dapo. A recipe selects one by algorithm.preset, and may
override single fields.
"""

OVERLONG_PARTS = {"dapo": 5}
"""Presets that set algorithm.overlong_buffer, with a divisor n: the buffer has max_new_tokens // n tokens, at least
1.
"""


class AlgorithmConfig(Section):
    """RL algorithm: advantages, policy loss, KL penalty, importance correction, choice of groups."""

    preset: (
        Literal[
            "grpo",
            "dr_grpo",
            "dapo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "gspo",
            "luspo",
            "gigpo",
            "dppo_tv",
            "dppo_kl",
            "vespo",
            "clip_cov",
            "kl_cov",
            "cispo",
            "ppo",
        ]
        | None
    ) = None
    """Published method, for example dapo. It sets the defaults of other algorithm fields; values in the recipe replace
    them. Default: none. Values of each method: launch/recipes/README.md."""
    advantage: Annotated[
        str,
        OnlyIf(REWARDS_TRAINED),
        Formula(
            "advantages", "ADVANTAGES", further=("gae", "rae"), measured=("lengths", "passes", "mask"), takes_own=True
        ),
    ] = "grpo"
    """Advantage estimator. Default: grpo. gae trains a critic, as in PPO. rae is for self-play: its baseline is a
    moving mean of the role's rewards. All names: megarl/algorithms/advantages.py. For your own, give its import path;
    signature: launch/recipes/README.md."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0), KeywordOf("algorithm.advantage")] = 1.0
    """Discount factor per token (advantage gae)."""
    role_decay: Annotated[float, Field(ge=0.0, lt=1.0), KeywordOf("algorithm.advantage")] = 0.95
    """Decay of a role's baseline per sample: baseline = role_decay * baseline + (1 - role_decay) * reward (advantage
    rae; SPIRAL, arXiv 2506.24119). Its first value is 0; checkpoints contain it."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0), KeywordOf("algorithm.advantage")] = 0.95
    """GAE lambda (advantage gae). 1: Monte-Carlo return minus the value. 0: one-step TD error."""
    # A turn that another sample of the group lacks gets the advantage of its whole trajectory. Rewards not tied to a
    # turn: scores of reward functions and of the reward model, KL and the length penalty.
    turn_discount: Annotated[Annotated[float, Field(ge=0.0, le=1.0)] | None, OnlyIf(REWARDS_TRAINED, *TURNS)] = None
    """Discount factor per turn: a turn's return is its reward plus turn_discount times the next turn's return. Its
    baseline is the same turn of the group's other samples. Other rewards count at the last turn. Default: none, all
    tokens get the sum of all rewards. gae always rewards each turn at its last token, and discounts by gamma."""
    state_weight: Annotated[NonNegativeFloat, OnlyIf(REWARDS_TRAINED, *TURNS)] = 0.0
    """Weight of a second advantage for each turn (GiGPO, arXiv 2505.10978: 1). It is the turn's return minus the mean
    return of all turns of the prompt's samples in the same state. The environment names the states. 0 (default): no
    second advantage."""
    state_discount: Annotated[Annotated[float, Field(ge=0.0, le=1.0)], OnlyIf(STATES)] = 0.95
    """Discount factor per turn for the returns of the second advantage (state_weight). A reward of the whole attempt
    is added to its last turn."""
    normalize_by_std: Annotated[bool, KeywordOf("algorithm.advantage")] = True
    """Divide advantages by the group's standard deviation of rewards. true (default): as in GRPO. false: as in Dr.
    GRPO."""
    reward_order: Annotated[
        Literal["sum_then_normalize", "normalize_then_sum"], OnlyIf(REWARDS_TRAINED, GRPO, DEVIATION)
    ] = "sum_then_normalize"
    """Combination of several reward functions' scores into one advantage (grpo). sum_then_normalize (default):
    normalise their weighted sum in the group to mean 0, deviation 1. normalize_then_sum (GDPO): normalise each
    function's scores in the group, then the weighted sum over the step, so that no function dominates by its scale."""
    lone_sample: Annotated[Literal["zero", "reward"], KeywordOf("algorithm.advantage")] = "zero"
    """Advantage of a sample alone in its group (grpo, rloo, maxrl, opo, reinforce_plus_plus_baseline). zero (default):
    0. reward: its reward, as in verl."""
    pass_k: Annotated[PositiveInt, KeywordOf("algorithm.advantage", "k")] = 4
    """k of the objective pass@k: k samples pass if at least one of them does (advantage pass_at_k). k is below
    train.samples_per_prompt."""
    advantage_kwargs: Annotated[Kwargs, OnlyIf(REWARDS_TRAINED)] = Field(default_factory=dict)
    """Further keyword arguments of the advantage estimator, for example {epsilon: 1e-4} for grpo."""
    whiten_advantages: Annotated[bool, OnlyIf(REWARDS_TRAINED)] = False
    """Whiten advantages over all trained tokens of a step, to mean 0 and variance 1. In loop distillation only the
    rewards' part is whitened."""
    policy_loss: Annotated[str, OnlyIf(*ADVANTAGES), Formula("policy_losses", "POLICY_LOSSES", takes_own=True)] = (
        "clipped"
    )
    """Policy loss. Default: clipped, as in PPO. All names: megarl/algorithms/policy_losses.py. For your own, give its
    import path; signature: launch/recipes/README.md."""
    clip_low: Annotated[PositiveFloat, KeywordOf("algorithm.policy_loss")] = 0.2
    """Lower clip range: the probability ratio is clipped at 1 - clip_low. gmpo: the log-ratio at -clip_low. dppo_tv
    (DPPO, arXiv 2602.04879): maximum decrease of a token's probability. dppo_kl: maximum KL of a token with decreased
    probability."""
    clip_high: Annotated[PositiveFloat, KeywordOf("algorithm.policy_loss")] = 0.2
    """Upper clip range: the probability ratio is clipped at 1 + clip_high (DAPO: 0.28). dppo_tv: maximum increase of a
    token's probability (prime-rl: 0.2). dppo_kl: maximum KL of a token with increased probability (0.05)."""
    dual_clip: Annotated[Annotated[float, Field(gt=1.0)] | None, KeywordOf("algorithm.policy_loss")] = None
    """Constant c of dual-clip PPO: with a negative advantage, a token's loss is at most c * |advantage|. Default:
    none."""
    max_ratio: Annotated[Annotated[float, Field(gt=1.0)] | None, KeywordOf("algorithm.policy_loss")] = None
    """Upper bound of the probability ratio, applied before clipping (ColossalChat uses 10). Default: none."""
    log_ratio_penalty: Annotated[NonNegativeFloat, KeywordOf("algorithm.policy_loss")] = 0.0
    """Coefficient of the squared log-ratio in the loss of every trained token, to slow its drift (dppo_tv, dppo_kl;
    Kimi K2.5, arXiv 2602.02276; prime-rl: 1e-3). Default: 0."""
    policy_loss_kwargs: Annotated[Kwargs, OnlyIf(*ADVANTAGES)] = Field(default_factory=dict)
    """Further keyword arguments of the policy loss, for example {temperature_negative: 1.1} for sapo. dro requires
    beta, the strength of its penalty: {beta: 0.1}."""
    # Only for loop rl, the section's condition: in loop distillation each token has its own advantage.
    off_policy_limit: PositiveFloat | None = None
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556; TRL: 0.5): drop the policy loss of a sequence if
    its advantage is negative and the mean of its old minus new log-probs is above this limit, in nats. Denominators
    still count it. Default: none. Metric: train/off_policy_fraction."""
    skip_ratio: Annotated[Annotated[float, Field(gt=1.0)] | None, OnlyIf(*ADVANTAGES)] = None
    """Skip an update if its mean probability ratio over tokens is above this limit (ColossalRL's skip_threshold: 20).
    Default: never."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the policy's loss."""
    # The entropies are those of the sampling distribution (temperature, top-p, top-k and min-p included).
    entropy_top_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of a step's trained tokens with a policy loss: those with the highest entropy (Wang et al. 2025: 0.2).
    Default: all. Denominators, KL and entropy bonus still use all tokens. Needs old_logprobs trainer, to compute
    entropies before the update. Metrics: entropy/threshold, entropy/trained_share."""
    # clip_cov_share and kl_cov_share select tokens once per step, by the log-probs before its first update.
    clip_cov_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Clip-Cov (arXiv 2505.22617: 2e-4) against a loss of entropy: drop the policy loss of this share of a step's
    trained tokens. They are drawn from the tokens with a covariance of log-prob and advantage within clip_cov_range.
    Default: none. Needs old_logprobs trainer."""
    clip_cov_range: Annotated[tuple[float, float], OnlyIf(non_empty("algorithm.clip_cov_share", "2e-4"))] = (1.0, 5.0)
    """Range of covariances, [low, high], from which clip_cov_share draws tokens."""
    kl_cov_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """KL-Cov (arXiv 2505.22617; verl: 2e-4, SkyRL: 0.2): penalise the absolute log-ratio of this share of a step's
    trained tokens, those with the highest covariance of log-prob and advantage. Default: none. Needs old_logprobs
    trainer and several updates a step."""
    kl_cov_coefficient: Annotated[PositiveFloat, OnlyIf(non_empty("algorithm.kl_cov_share", "2e-4"))] = 1.0
    """Coefficient of the penalty of kl_cov_share."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty towards the reference model. 0 (default): no penalty and no reference model."""
    kl_placement: Annotated[Literal["loss", "reward", "return", "advantage"], OnlyIf(KL)] = "loss"
    """Place of the KL penalty. loss (default): added to the loss. reward: subtracted from rewards, per token (gae) or
    per sample. return: subtracted from a token's advantage, summed from the token to the end (REINFORCE++). advantage:
    subtracted from a token's advantage."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3", "absolute"], OnlyIf(KL)] = "k3"
    """Estimator of a token's KL: k1, k2, k3 (default) or absolute. Formulas: megarl/algorithms/kl.py."""
    # k3 grows exponentially with the log-ratio, so one token can dominate a step's penalty.
    k3_max: Annotated[PositiveFloat | None, OnlyIf(KL, one_of("algorithm.kl_estimator", "k3"))] = None
    """Upper bound of a token's KL by the estimator k3 (verl: 10). Default: none. Metric: kl/capped, the share of tokens
    above it."""
    kl_unbiased: Annotated[
        bool, OnlyIf(KL, one_of("algorithm.kl_placement", "loss"), one_of("algorithm.kl_estimator", "k3", "k1"))
    ] = False
    """true: multiply each token's KL term by its probability ratio new / old; gradients flow through the ratio too
    (DeepSeek-V3.2, arXiv 2512.02556). The loss then has the exact KL's gradient, also on samples of older weights.
    false (default): no factor; the gradient of k3 is biased."""
    kl_target: Annotated[PositiveFloat | None, OnlyIf(KL)] = None
    """Target of the adaptive KL controller, in nats per token. Default: none, kl_coefficient stays constant."""
    kl_horizon: Annotated[PositiveFloat, OnlyIf(KL, non_empty("algorithm.kl_target"))] = 10000.0
    """Horizon n of the adaptive KL controller: n samples change the coefficient by at most a fifth."""
    reference_update_steps: Annotated[PositiveInt | None, OnlyIf(*REFERENCE)] = None
    """Steps between two updates of the reference model towards the policy (Gorbatovski et al. 2024). It serves the KL
    penalty, a preference loss, or distillation.teacher reference. Default: none, the reference stays the initial model.
    Metric: kl/reference_moved."""
    reference_mixing: Annotated[
        float, Field(gt=0.0, le=1.0), OnlyIf(*REFERENCE, non_empty("algorithm.reference_update_steps", "64"))
    ] = 1.0
    """Weight alpha of the policy in an updated reference model: alpha * policy + (1 - alpha) * reference, in
    model.dtype. 1 (default): copy the policy. In bfloat16 with alpha
    below 0.01, rounding removes most of the change."""
    importance_sampling: Annotated[
        str | None,
        OnlyIf(*ADVANTAGES),
        Formula("importance", "IMPORTANCE_SAMPLING"),
        BeforeValidator(lambda value: None if value == "none" else value),
    ] = None
    """Importance-sampling correction of the loss, because tokens were sampled by an engine, with other probabilities
    and perhaps older weights. With old_logprobs trainer it is decoupled PPO. Default: none; with rollout.max_staleness
    above 0 there is no default, so write none or a name of megarl/algorithms/importance.py."""
    importance_sampling_low: Annotated[NonNegativeFloat, KeywordOf("algorithm.importance_sampling", "low")] = 0.5
    """Lowest accepted ratio of trainer to engine probability. Tokens or sequences below it get no loss
    (importance_sampling icepop, rejection and masks). tis ignores this field."""
    importance_sampling_high: Annotated[PositiveFloat, KeywordOf("algorithm.importance_sampling", "high")] = 2.0
    """Highest accepted ratio of trainer to engine probability. A higher ratio is truncated to it (importance_sampling
    tis), or its token or sequence gets no loss (icepop, rejection and masks)."""
    importance_sampling_kwargs: Annotated[Kwargs, OnlyIf(*ADVANTAGES, CORRECTION)] = Field(default_factory=dict)
    """Further keyword arguments of the importance-sampling correction."""
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length", "sample_level"],
        OnlyIf(TOKEN_LOSS),
    ] = "token_mean"
    """Average of token losses over the global batch. Default: token_mean. All names: megarl/algorithms/reduction.py."""
    count_masked_sequences: Annotated[
        bool,
        OnlyIf(TOKEN_LOSS, SEQUENCE_MEAN),
    ] = False
    """Count sequences without trained tokens (because of mask_truncated) in the denominator, if the loss is a mean over
    sequences. TRL does. Default: false."""
    old_logprobs: Annotated[Literal["rollout", "trainer"], OnlyIf(*ADVANTAGES)] = "trainer"
    """Source of the old log-probs, the denominator of PPO's ratio. trainer (default): computed in the first update
    itself, or in a pass before it if later updates or advantages need them. rollout: recorded by the engine; the
    metrics logprob_gap/ then come from a step's first update."""
    dynamic_sampling: Annotated[tuple[float, float] | None, OnlyIf(REWARDS_TRAINED)] = None
    """Dynamic sampling (DAPO), [low, high]: train only groups with an accuracy strictly between low and high, and
    sample others instead. With dynamic_sampling_metric reward: only groups with rewards that differ by more than low.
    Default: none, train all groups."""
    dynamic_sampling_metric: Annotated[Literal["accuracy", "reward"] | None, OnlyIf(REWARDS_TRAINED, FILTER)] = None
    """Metric by which dynamic_sampling accepts a group. accuracy: share of right answers. reward: largest minus
    smallest reward. Default: accuracy if the environment, or a reward function with judges_answer, judges every answer;
    else reward."""
    max_attempts: Annotated[PositiveInt, OnlyIf(REWARDS_TRAINED, FILTER)] = 10
    """Maximum number of prompt batches sampled to fill one step (dynamic_sampling). A step that is still not full ends
    the run."""
    oversampling: Annotated[float, Field(ge=1.0), OnlyIf(*SURPLUS)] = 1.0
    """Prompts started per prompt trained in a step. 1 (default): no surplus. With dynamic_sampling, surplus groups
    train in the next step. With rollout.stragglers park or abort, the first complete groups train; rollout.stragglers
    decides about the others."""
    overlong_buffer: Annotated[OverlongBuffer, OnlyIf(REWARDS_TRAINED)] = None
    """Length penalty (DAPO): over the last n tokens before max_new_tokens, the reward falls linearly, in total by
    overlong_penalty * reward.correct_score. With several turns the longest turn counts, or their sum with
    rollout.budget.sampled_tokens as limit. Default: 0, no penalty (preset dapo: a fifth of max_new_tokens)."""
    overlong_penalty: Annotated[
        PositiveFloat, OnlyIf(REWARDS_TRAINED, non_empty("algorithm.overlong_buffer", "512"))
    ] = 1.0
    """Maximum length penalty, at the end of the overlong_buffer, in units of reward.correct_score (verl:
    penalty_factor)."""
    mask_truncated: Annotated[bool, OnlyIf(ON_POLICY)] = False
    """Exclude attempts that end at a length or time limit from the loss (DAPO's overlong filtering). Default: false."""
    ptx_coefficient: Annotated[float, Field(ge=0.0, lt=1.0), OnlyIf(PTX)] = 0.0
    """Coefficient c of PPO-ptx: the loss is (1 - c) * rl + c * (cross-entropy of the conversations in data.ptx). 0
    (default): none."""
    ptx_conversations: Annotated[PositiveInt, OnlyIf(non_empty("data.ptx", "talk.jsonl"))] = 32
    """Number of conversations of data.ptx used per step (PPO-ptx)."""

    @property
    def selects_by_covariance(self) -> bool:
        return self.clip_cov_share is not None or self.kl_cov_share is not None

    @property
    def needed_loss_metrics(self) -> dict[str, str]:
        """Metrics that the policy loss must return, with the fields that read them."""
        return {} if self.skip_ratio is None else {"ratio": "algorithm.skip_ratio"}

    @property
    def correction_settings(self) -> dict[str, Any]:
        return {
            "low": self.importance_sampling_low,
            "high": self.importance_sampling_high,
            **self.importance_sampling_kwargs,
        }

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the section with the preset's values, where the user gives none."""
        preset = values.get("preset") if isinstance(values, dict) else None
        if not isinstance(preset, str):
            return validate(values)
        # The user's values come last, so they win over the preset's.
        config = validate(PRESETS.get(preset, {}) | values)
        # Only the user's fields stay in model_fields_set. A field in it must have an effect (`config.effects`), but
        # a preset's value may have none.
        config.model_fields_set.intersection_update(values)
        return config


class CriticConfig(Section):
    """Critic of PPO: initial weights, optimizer, warm-up."""

    path: str | None = None
    """Folder of the critic's initial weights: a Hugging Face language model, or a reward model with the policy's
    vocabulary. Default: model.path."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
    """Optimizer and learning-rate schedule of the critic."""
    clip: PositiveFloat | None = 0.2
    """Clip range of the value loss: maximum distance of a value from its value before the update. null: no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Critic warm-up: number of steps at the start that update only the critic, not the policy."""
    updates_per_step: PositiveInt = 1
    """Number of critic minibatches per step, each one optimizer update of the critic."""


class PreferenceConfig(Section):
    """Losses on pairs of chosen and rejected answers, or on single answers labelled good or bad (kto)."""

    loss: Annotated[str, Formula("preference_losses", "PREFERENCE_LOSSES", measured=("kl",))] = "dpo"
    """Preference loss. Default: dpo. dpo, ipo and kto load a reference model. kto takes single answers labelled good or
    bad instead of pairs. All names: megarl/algorithms/preference_losses.py."""
    beta: Annotated[PositiveFloat, KeywordOf("preference.loss")] = 0.1
    """Beta of the preference loss: strength of the KL constraint (dpo, ipo, kto), scale of the reward (simpo: 2), or
    weight of the odds ratio (orpo)."""
    margin: Annotated[NonNegativeFloat, OnlyIf(PAIRS, takes_margin), KeywordOf("preference.loss")] = 0.0
    """Target margin between the rewards of the chosen and the rejected answer (dpo; simpo: 1; loop reward_model)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5), KeywordOf("preference.loss")] = 0.0
    """Label smoothing: assumed probability that a pair's label is wrong (conservative dpo)."""
    normalize_by_length: Annotated[bool, KeywordOf("preference.loss")] = False
    """Average log-probs over an answer's tokens instead of summing them (dpo, ipo)."""
    desirable_weight: Annotated[PositiveFloat, KeywordOf("preference.loss")] = 1.0
    """Weight of desirable answers in the loss (kto)."""
    undesirable_weight: Annotated[PositiveFloat, KeywordOf("preference.loss")] = 1.0
    """Weight of undesirable answers in the loss (kto). Both weights together can balance unequal numbers of answers."""
    loss_kwargs: Kwargs = Field(default_factory=dict)
    """Further keyword arguments of the preference loss."""
