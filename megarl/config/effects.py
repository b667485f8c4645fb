"""Effects of recipe fields: the loop, algorithm or other field under which each field does something.

The schema is one model with this table, not a union of models chosen by `loop`. A union has four faults. A misspelt
`loop` hides all other errors. Field names get the union's tags as a prefix. A condition on the algorithm (gae, clipped,
kto) needs a model per combination. Every reader of `recipe.algorithm` must narrow the type first. With a table the
error explains why a field does nothing.

Only given fields are errors: defaults and a preset's values may have no effect. Descriptions of machines (`cluster.*`)
are always accepted, because one recipe runs under any launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megarl.config.formulas import FIELDS, either, formulas, taking
from megarl.files.import_path import is_import_path

if TYPE_CHECKING:
    from megarl.config import Recipe


@dataclass(frozen=True, slots=True)
class Needs:
    """Condition for a recipe field to have an effect. `fields` decide it; `remedy` says how to meet it."""

    fields: tuple[str, ...]
    remedy: str
    holds: Callable[[Recipe], bool]
    is_alternative: bool = False
    """Both fields express the same setting: an override of one replaces the other in the file."""

    def state(self, recipe: Recipe) -> str:
        """Return the deciding fields and values in words: `under loop=sft`, `without reward.model`."""
        values = {field: value_at(recipe, field) for field in self.fields}
        absent = [field for field, value in values.items() if value is None or value == {}]
        shown = {name: ", ".join(value) if isinstance(value, dict) else value for name, value in values.items()}
        present = [f"{field}={shown[field]}" for field in values if field not in absent]
        parts = ["under " + " and ".join(present)] if present else []
        parts += ["without " + " or ".join(absent)] if absent else []
        return " ".join(parts)


def value_at(recipe: Recipe, field: str) -> Any:
    """Return the value of a field by its dotted name."""
    value: Any = recipe
    for part in field.split("."):
        value = getattr(value, part)
    return value


def _one_of(field: str, *values: str) -> Needs:
    return Needs((field,), f"set {field} to {either(values)}", lambda recipe: value_at(recipe, field) in values)


def _given(field: str) -> Needs:
    return Needs((field,), f"give {field}", lambda recipe: bool(value_at(recipe, field)))


def _left_out(field: str) -> Needs:
    return Needs((field,), f"leave out {field} ({field}=default)", lambda recipe: not value_at(recipe, field))


def _instead_of(field: str) -> Needs:
    return replace(_left_out(field), is_alternative=True)


def _above_zero(field: str) -> Needs:
    return Needs((field,), f"set {field} above 0", lambda recipe: value_at(recipe, field) > 0)


def _takes(field: str, keyword: str) -> Needs:
    """Require a formula with this keyword. A user's own formula may take any keyword: see `preflight.keywords`."""

    def holds(recipe: Recipe) -> bool:
        name = value_at(recipe, field)
        return name is not None and (is_import_path(name) or keyword in formulas(field)[name])

    return Needs((field,), f"set {field} to {either(taking(field, keyword))}", holds)


_ALWAYS = ()
_RL = _one_of("loop", "rl")
_ON_POLICY = _one_of("loop", "rl", "distillation")
_TOKEN_LOSS = _one_of("loop", "rl", "sft", "distillation")
_SFT = _one_of("loop", "sft")
_PAIRS = _one_of("loop", "preference", "reward_model")
_PREFERENCE = _one_of("loop", "preference")
_LOGPROBS = _one_of("loop", "rl", "sft", "preference", "distillation")
_DISTILLATION = _one_of("loop", "distillation")
_ADVANTAGES = (
    _ON_POLICY,
    Needs(("distillation.loss",), "set distillation.loss to sampled_token", lambda recipe: recipe.has_advantages),
)
_DIVERGENCE = (_DISTILLATION, _one_of("distillation.loss", "top_k", "full_vocabulary"))
_SAMPLES = Needs(("data.validation",), "give data.validation", lambda recipe: recipe.has_engine)
_ENGINE = (_TOKEN_LOSS, _SAMPLES)
_EVALUATED = Needs(
    ("data.validation", "data.validation_conversations"),
    "give data.validation",
    lambda recipe: bool(recipe.validation_sets) or recipe.checkpoint.best is None,
)
# Neither coefficient 0 nor data null needs the other field: both are overrides to train without ptx.
_PTX = Needs(
    ("data.ptx",), "give data.ptx", lambda recipe: bool(recipe.data.ptx or not recipe.algorithm.ptx_coefficient)
)
_PTX_COEFFICIENT = Needs(
    ("algorithm.ptx_coefficient",),
    "set algorithm.ptx_coefficient above 0",
    lambda recipe: bool(recipe.algorithm.ptx_coefficient or not recipe.data.ptx),
)
_GAE = (_RL, _one_of("algorithm.advantage", "gae"))
_KL = (_RL, _above_zero("algorithm.kl_coefficient"))
_REFERENCE = (
    _one_of("loop", "rl", "preference"),
    Needs(
        ("algorithm.kl_coefficient", "preference.loss"),
        "set algorithm.kl_coefficient above 0 in loop rl, preference.loss to dpo, ipo or kto in loop preference",
        lambda recipe: recipe.has_reference,
    ),
)
_LORA = (_LOGPROBS, _above_zero("lora.rank"))
_FILTER = (_RL, _given("algorithm.dynamic_sampling"))
_PARK = (_RL, _one_of("rollout.stragglers", "park"))
_SEPARATE = (_RL, _one_of("rollout.placement", "separate"))
_COLOCATED = (_RL, _one_of("rollout.placement", "colocated"))
_STALE = (
    _RL,
    Needs(
        ("rollout.placement", "rollout.stragglers"),
        "set rollout.placement to separate, or rollout.stragglers to park",
        lambda recipe: recipe.rollout.placement == "separate" or recipe.rollout.stragglers == "park",
    ),
)
_UNPACED = Needs(
    ("rollout.placement", "rollout.max_staleness"),
    "set rollout.max_staleness to 0",
    lambda recipe: not recipe.rollout.is_paced,
)
# Only engines ahead of the trainer have requests in flight during a reshard.
_PACED = Needs(
    ("rollout.placement", "rollout.max_staleness"),
    "set rollout.placement to separate and rollout.max_staleness to at least 1; otherwise no request is in flight then",
    lambda recipe: recipe.rollout.is_paced,
)
_SURPLUS = (
    _RL,
    _UNPACED,
    Needs(
        ("algorithm.dynamic_sampling", "rollout.stragglers"),
        "give algorithm.dynamic_sampling, or set rollout.stragglers to park or abort",
        lambda recipe: recipe.algorithm.dynamic_sampling is not None or recipe.rollout.stragglers != "wait",
    ),
)
_REWARD_MODEL = (_RL, _given("reward.model"))
_TURNS = (
    _RL,
    Needs(
        ("algorithm.advantage",),
        "set algorithm.advantage to an estimator comparing rewards: gae has algorithm.gamma, pass_at_k counts passes",
        lambda recipe: recipe.algorithm.advantage not in ("gae", "pass_at_k"),
    ),
    Needs(
        ("rollout.environment",),
        "set rollout.environment to one with several turns",
        lambda recipe: recipe.rollout.environment != "single_turn",
    ),
    Needs(
        ("rollout.max_turns",),
        "raise rollout.max_turns: there is no second turn",
        lambda recipe: recipe.rollout.turns_of_attempt > 1,
    ),
)
_NOT_SINGLE_TURN = Needs(
    ("rollout.environment",),
    "set rollout.environment to another",
    lambda recipe: recipe.rollout.environment != "single_turn",
)
_AGENTS = ("command", "verifiers")
"""Environments with their own agent loop. A user's environment may have one too, unknown until it is imported."""
_AGENT = Needs(
    ("rollout.environment",),
    f"set rollout.environment to {either(_AGENTS)}",
    lambda recipe: recipe.rollout.environment in _AGENTS or ":" in recipe.rollout.environment,
)
_NOT_AGENT = Needs(
    ("rollout.environment",),
    "set rollout.environment to another",
    lambda recipe: recipe.rollout.environment not in _AGENTS,
)
_NOT_COMMAND = Needs(
    ("rollout.environment",),
    "set rollout.environment to another",
    lambda recipe: recipe.rollout.environment != "command",
)
_SANDBOX = Needs(
    ("rollout.environment",),
    "put code, or a function of your own, into reward.functions, or set rollout.environment to python",
    lambda recipe: any(_runs_programs(source.recipe) for source in recipe.sources),
)
# A SandboxFusion server has its own isolation and packages.
_HERE = Needs(("sandbox.url",), "leave sandbox.url out", lambda recipe: recipe.sandbox.url is None)
_MOVING_TEMPERATURE = _one_of("rollout.sampling.temperature_schedule", "linear", "cosine")
# Reported where every source of a mixture overrides the field, so the recipe's value is never used.
_NOT_OWN = Needs(("mixture",), "remove it from a source; every source has its own", lambda recipe: False)
_CURRICULUM = (_ON_POLICY, _given("data.curriculum.band"))
_CORRECTION = (*_ADVANTAGES, _given("algorithm.importance_sampling"))
_MARGIN = Needs(
    ("preference.loss",),
    f"set preference.loss to {either(taking('preference.loss', 'margin'))}",
    lambda recipe: recipe.loop == "reward_model" or _takes("preference.loss", "margin").holds(recipe),
)


def _runs_programs(recipe: Recipe) -> bool:
    """Return whether rewards or environment may run programs of the policy. A user's own code may, too."""
    names = [function.name for function in recipe.reward.functions]
    return any(name == "code" or ":" in name for name in names) or (
        recipe.rollout.environment == "python" or ":" in recipe.rollout.environment
    )


def _optimizer(section: str, needs: tuple[Needs, ...]) -> dict[str, tuple[Needs, ...]]:
    falling = _one_of(f"{section}.schedule", "linear", "cosine", "wsd")
    adam = _one_of(f"{section}.name", "adam")
    conditions: dict[str, tuple[Needs, ...]] = {
        "name": _ALWAYS,
        "learning_rate": _ALWAYS,
        "schedule": _ALWAYS,
        "decay_steps": (_one_of(f"{section}.schedule", "wsd"),),
        "warmup_steps": (_instead_of(f"{section}.warmup_ratio"),),
        "warmup_ratio": _ALWAYS,
        "min_learning_rate": (falling,),
        "weight_decay": _ALWAYS,
        "betas": (adam,),
        "epsilon": (adam,),
        "clip_grad_norm": _ALWAYS,
        "max_skipped_updates": _ALWAYS,
    }
    return {f"{section}.{name}": (*needs, *own) for name, own in conditions.items()}


def _advantage(keyword: str) -> tuple[Needs, ...]:
    return (_RL, _takes("algorithm.advantage", keyword))


def _policy_loss(keyword: str) -> tuple[Needs, ...]:
    return (*_ADVANTAGES, _takes("algorithm.policy_loss", keyword))


def _preference(keyword: str) -> tuple[Needs, ...]:
    return (_PREFERENCE, _takes("preference.loss", keyword))


EFFECTS: dict[str, tuple[Needs, ...]] = {
    "name": _ALWAYS,
    "loop": _ALWAYS,
    "seed": _ALWAYS,
    "runs_folder": _ALWAYS,
    "samples_every_steps": (_ON_POLICY,),
    "samples_with_tokens": _ADVANTAGES,
    "trackers": _ALWAYS,
    "model.path": _ALWAYS,
    "model.dtype": _ALWAYS,
    "model.override_config": _ALWAYS,
    "model.chat_template": _ALWAYS,
    "model.chat_template_kwargs": _ALWAYS,
    "data.train": _ALWAYS,
    "data.validation": _ALWAYS,
    "data.validation_conversations": (_SFT,),
    "data.ptx": (_RL, _PTX_COEFFICIENT),
    "data.format": _ALWAYS,
    "data.fields": _ALWAYS,
    "data.answer_field": _ENGINE,
    "data.system_prompt": _ALWAYS,
    "data.max_prompt_tokens": _ENGINE,
    "data.overlong": _ALWAYS,
    "data.streaming": _ALWAYS,
    "data.shuffle": _ALWAYS,
    "data.curriculum.band": (_ON_POLICY,),
    "data.curriculum.outside": _CURRICULUM,
    "data.curriculum.memory": _CURRICULUM,
    "data.curriculum.by": _CURRICULUM,
    "mixture": (_ON_POLICY,),
    "cluster": _ALWAYS,
    "trainer.tp": _ALWAYS,
    "trainer.pp": _ALWAYS,
    "trainer.dp": _ALWAYS,
    "trainer.vpp": _ALWAYS,
    "trainer.cp": _ALWAYS,
    "trainer.ep": _ALWAYS,
    "trainer.etp": _ALWAYS,
    "trainer.rank_order": _ALWAYS,
    "trainer.align_ranks": (*_ENGINE, _one_of("rollout.placement", "colocated")),
    "trainer.sequence_parallel": _ALWAYS,
    "trainer.distributed_optimizer": _ALWAYS,
    "trainer.overlap_grad_reduce": _ALWAYS,
    "trainer.router_replay": (_RL,),
    "trainer.moe_dispatcher": _ALWAYS,
    "trainer.recompute": _ALWAYS,
    "trainer.recompute_modules": (_one_of("trainer.recompute", "selective"),),
    "trainer.fp8": _ALWAYS,
    "trainer.offload": _ALWAYS,
    "trainer.optimizer_offload_fraction": _ALWAYS,
    "trainer.max_tokens_per_microbatch": _ALWAYS,
    "trainer.logprob_chunk_tokens": (_LOGPROBS,),
    "trainer.megatron": _ALWAYS,
    "lora.rank": _ALWAYS,
    "lora.alpha": _LORA,
    "lora.dropout": _LORA,
    "lora.targets": _LORA,
    "lora.export_adapter": _LORA,
    **_optimizer("optimizer", _ALWAYS),
    "rollout.placement": _ENGINE,
    "rollout.ranks": (*_ENGINE, _one_of("rollout.placement", "separate")),
    "rollout.tp": _ENGINE,
    "rollout.sampling.max_new_tokens": _ENGINE,
    "rollout.sampling.temperature": (_ON_POLICY,),
    "rollout.sampling.temperature_schedule": (_ON_POLICY,),
    "rollout.sampling.end_temperature": (_ON_POLICY, _MOVING_TEMPERATURE),
    "rollout.sampling.temperature_steps": (_ON_POLICY, _MOVING_TEMPERATURE),
    "rollout.sampling.top_p": (_ON_POLICY,),
    "rollout.sampling.top_k": (_ON_POLICY,),
    "rollout.sampling.min_p": (_ON_POLICY,),
    "rollout.sampling.stop": _ENGINE,
    "rollout.sampling.stop_token_ids": _ENGINE,
    "rollout.environment": _ENGINE,
    "rollout.environment_kwargs": (*_ENGINE, _NOT_SINGLE_TURN, _NOT_COMMAND),
    "rollout.environment_processes": (*_ENGINE, _NOT_SINGLE_TURN, _NOT_COMMAND),
    "rollout.environment_memory_gib": (*_ENGINE, _NOT_SINGLE_TURN, _NOT_COMMAND),
    "rollout.tool_parser": (*_ENGINE, _NOT_SINGLE_TURN),
    "rollout.max_turns": _ENGINE,
    "rollout.truncated_turn": (*_ENGINE, _NOT_AGENT),
    "rollout.agent": (*_ENGINE, _AGENT),
    "rollout.endpoint": (*_ENGINE, _AGENT),
    "rollout.history": (*_ENGINE, _NOT_SINGLE_TURN, _NOT_AGENT),
    "rollout.budget": (*_ENGINE, _NOT_SINGLE_TURN, _NOT_AGENT),
    "rollout.stragglers": _COLOCATED,
    "rollout.max_staleness": _STALE,
    "rollout.sync_every": _SEPARATE,
    "rollout.recompute_kv": (_RL, _PACED),
    "rollout.on_stale": _PARK,
    "rollout.max_concurrent_requests": _ENGINE,
    "rollout.async_scheduling": _ENGINE,
    "rollout.kv_cache_gib": (*_ENGINE, _instead_of("rollout.gpu_memory_utilization")),
    "rollout.gpu_memory_utilization": _ENGINE,
    "rollout.quantization": _ENGINE,
    "rollout.kv_cache_dtype": _ENGINE,
    "rollout.vllm": _ENGINE,
    "reward.functions": _ENGINE,
    "reward.function_weight": _REWARD_MODEL,
    "reward.model": (_RL,),
    "reward.model_weight": _REWARD_MODEL,
    "reward.model_clip": _REWARD_MODEL,
    "reward.num_workers": _ENGINE,
    "reward.timeout_seconds": _ENGINE,
    "reward.wall_timeout_seconds": _ENGINE,
    "reward.max_failed_fraction": _ENGINE,
    "reward.on_failure": _ENGINE,
    "reward.correct_score": _ENGINE,
    "reward.source_field": _ENGINE,
    "sandbox.require": (*_ENGINE, _SANDBOX, _HERE),
    "sandbox.url": (*_ENGINE, _SANDBOX),
    "sandbox.timeout_seconds": (*_ENGINE, _SANDBOX),
    "sandbox.wall_timeout_seconds": (*_ENGINE, _SANDBOX),
    "sandbox.total_timeout_seconds": (*_ENGINE, _SANDBOX),
    "sandbox.memory_mib": (*_ENGINE, _SANDBOX),
    "sandbox.output_kib": (*_ENGINE, _SANDBOX),
    "sandbox.packages": (*_ENGINE, _SANDBOX, _HERE),
    "algorithm.preset": (_RL,),
    "algorithm.advantage": (_RL,),
    "algorithm.gamma": _advantage("gamma"),
    "algorithm.gae_lambda": _advantage("gae_lambda"),
    "algorithm.turn_discount": _TURNS,
    "algorithm.normalize_by_std": _advantage("normalize_by_std"),
    "algorithm.reward_order": (
        _RL,
        _one_of("algorithm.advantage", "grpo"),
        Needs(
            ("algorithm.normalize_by_std",),
            "set algorithm.normalize_by_std to true: without the deviation both orders are equal",
            lambda recipe: recipe.algorithm.normalize_by_std,
        ),
    ),
    "algorithm.lone_sample": _advantage("lone_sample"),
    "algorithm.pass_k": _advantage("k"),
    "algorithm.advantage_kwargs": (_RL,),
    "algorithm.whiten_advantages": (_RL,),
    "algorithm.policy_loss": _ADVANTAGES,
    "algorithm.clip_low": _policy_loss("clip_low"),
    "algorithm.clip_high": _policy_loss("clip_high"),
    "algorithm.dual_clip": _policy_loss("dual_clip"),
    "algorithm.max_ratio": _policy_loss("max_ratio"),
    "algorithm.policy_loss_kwargs": _ADVANTAGES,
    "algorithm.skip_ratio": _ADVANTAGES,
    "algorithm.entropy_coefficient": (_RL,),
    "algorithm.entropy_top_share": (_RL,),
    "algorithm.kl_coefficient": (_RL,),
    "algorithm.kl_placement": _KL,
    "algorithm.kl_estimator": _KL,
    "algorithm.k3_max": (*_KL, _one_of("algorithm.kl_estimator", "k3")),
    "algorithm.kl_target": _KL,
    "algorithm.kl_horizon": (*_KL, _given("algorithm.kl_target")),
    "algorithm.reference_update_steps": _REFERENCE,
    "algorithm.reference_mixing": (*_REFERENCE, _given("algorithm.reference_update_steps")),
    "algorithm.importance_sampling": _ADVANTAGES,
    "algorithm.importance_sampling_low": (*_CORRECTION, _takes("algorithm.importance_sampling", "low")),
    "algorithm.importance_sampling_high": (*_CORRECTION, _takes("algorithm.importance_sampling", "high")),
    "algorithm.importance_sampling_kwargs": _CORRECTION,
    "algorithm.aggregation": (_TOKEN_LOSS,),
    "algorithm.count_masked_sequences": (
        _TOKEN_LOSS,
        _one_of("algorithm.aggregation", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"),
    ),
    "algorithm.old_logprobs": _ADVANTAGES,
    "algorithm.dynamic_sampling": (_RL,),
    "algorithm.dynamic_sampling_metric": _FILTER,
    "algorithm.max_attempts": _FILTER,
    "algorithm.oversampling": _SURPLUS,
    "algorithm.overlong_buffer": (_RL,),
    "algorithm.overlong_penalty": (_RL, _given("algorithm.overlong_buffer")),
    "algorithm.mask_truncated": (_ON_POLICY,),
    "algorithm.ptx_coefficient": (_RL, _PTX),
    "algorithm.ptx_conversations": (_RL, _given("data.ptx")),
    "critic.path": _GAE,
    **_optimizer("critic.optimizer", _GAE),
    "critic.clip": _GAE,
    "critic.warmup_steps": _GAE,
    "critic.updates_per_step": _GAE,
    "preference.loss": (_PREFERENCE,),
    "preference.beta": _preference("beta"),
    "preference.margin": (_PAIRS, _MARGIN),
    "preference.label_smoothing": _preference("label_smoothing"),
    "preference.normalize_by_length": _preference("normalize_by_length"),
    "preference.desirable_weight": _preference("desirable_weight"),
    "preference.undesirable_weight": _preference("undesirable_weight"),
    "preference.loss_kwargs": (_PREFERENCE,),
    "distillation.teacher": (_DISTILLATION,),
    "distillation.tp": (_DISTILLATION,),
    "distillation.pp": (_DISTILLATION,),
    "distillation.cp": (_DISTILLATION,),
    "distillation.ep": (_DISTILLATION,),
    "distillation.etp": (_DISTILLATION,),
    "distillation.loss": (_DISTILLATION,),
    "distillation.gamma": (_DISTILLATION, _one_of("distillation.loss", "sampled_token")),
    "distillation.max_log_ratio": (_DISTILLATION, _one_of("distillation.loss", "sampled_token")),
    "distillation.divergence": _DIVERGENCE,
    "distillation.jsd_beta": (*_DIVERGENCE, _takes("distillation.divergence", "beta")),
    "distillation.temperature": _DIVERGENCE,
    "distillation.top_k": (_DISTILLATION, _one_of("distillation.loss", "top_k")),
    "distillation.tail": (_DISTILLATION, _one_of("distillation.loss", "top_k")),
    "train.steps": (_instead_of("train.epochs"),),
    "train.epochs": (_left_out("mixture"),),
    "train.prompts_per_step": _ALWAYS,
    "train.samples_per_prompt": (_ON_POLICY,),
    "train.updates_per_step": (_ON_POLICY,),
    "train.epochs_per_step": (_ON_POLICY,),
    "train.profile_steps": _ALWAYS,
    "train.max_logprob_gap": (_ON_POLICY, _UNPACED),
    "train.on_logprob_gap": (_ON_POLICY, _UNPACED, _given("train.max_logprob_gap")),
    "train.on_unhealthy": _ALWAYS,
    **dict.fromkeys(("health.off", "health.window", "health.learning_rate", "health.grad_norm_rise"), _ALWAYS),
    **dict.fromkeys(("health.entropy_rise", "health.entropy_high"), _ALWAYS),
    **dict.fromkeys(("health.truncated", "health.entropy_low"), (_ON_POLICY,)),
    **dict.fromkeys(("health.logprob_gap_rise", "health.logprob_gap_high"), (_ON_POLICY,)),
    **dict.fromkeys(("health.validation_drop", "health.reward_rise"), (_RL,)),
    "evaluation.every_steps": _ALWAYS,
    "evaluation.at_start": _ALWAYS,
    "evaluation.max_problems": _ALWAYS,
    "evaluation.samples_per_prompt": _ENGINE,
    "evaluation.k": _ENGINE,
    "evaluation.sampling": _ENGINE,
    "weights.bucket_mib": _ALWAYS,
    "weights.overlap": (_RL, _PACED),
    "weights.verify_every": _ENGINE,
    "weights.probe_tolerance": _ENGINE,
    **dict.fromkeys(("checkpoint.every_steps", "checkpoint.keep", "checkpoint.asynchronous"), _ALWAYS),
    "checkpoint.export_every_steps": _ALWAYS,
    "checkpoint.best": (_EVALUATED,),
}
"""Conditions for an effect, by recipe field. All must hold. A section stands for all its fields if their conditions are
the same."""


def conditions(field: str) -> tuple[Needs, ...]:
    """Return the conditions of a field, or of the section around it."""
    name = field
    while name not in EFFECTS and "." in name:
        name = name.rpartition(".")[0]
    return EFFECTS[name]


def unmet(recipe: Recipe, field: str) -> Needs | None:
    """Return the first unmet condition of a field (the field does nothing), or None if it has an effect.

    In a mixture one source using the recipe's value is enough for an effect.
    """
    # A source's recipe has an empty mixture, so a condition on the mixture is checked on the whole recipe.
    if (need := next((need for need in conditions(field) if need.fields == ("mixture",)), None)) and recipe.mixture:
        return need
    found = [unmet_in(source.recipe, field) for source in recipe.sources if source.place(field) == field]
    return _NOT_OWN if not found else None if None in found else found[0]


def unmet_in(recipe: Recipe, field: str) -> Needs | None:
    """Return the first unmet condition for a recipe field to have an effect. None: the recipe meets all of them.

    `recipe` is the recipe of a single source (`Recipe.sources`): without a mixture, the run's.
    """
    return next((need for need in conditions(field) if not need.holds(recipe)), None)


def may_be_idle(recipe: Recipe, field: str) -> bool:
    """Return whether a field is a keyword argument of a user's own formula, so its use is unknown."""
    owners = (owner for owner, keywords in FIELDS.items() if field in keywords.values())
    return any(is_import_path(value_at(recipe, owner) or "") for owner in owners)
