"""Conditions under which recipe fields have an effect, for `OnlyIf` annotations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.config.annotations import Condition
from megarl.config.formulas import either, formulas, taking
from megarl.config.schema import value_at
from megarl.files.import_path import is_import_path

if TYPE_CHECKING:
    from megarl.config import Recipe


def one_of(field: str, *values: str, example: str = "") -> Condition:
    remedy = f"set {field} to {either(values)}"
    return Condition(
        (field,), remedy, lambda recipe: value_at(recipe, field) in values, example or f"{field}={values[0]}"
    )


def non_empty(field: str, example: str = "") -> Condition:
    return Condition((field,), f"give {field}", lambda recipe: bool(value_at(recipe, field)), f"{field}={example}")


def left_out(field: str) -> Condition:
    return Condition((field,), f"leave out {field} ({field}=default)", lambda recipe: not value_at(recipe, field))


def instead_of(field: str) -> Condition:
    """`field` is the other way to write the same setting."""
    return replace(left_out(field), is_alternative=True)


def above_zero(field: str, example: str) -> Condition:
    return Condition((field,), f"set {field} above 0", lambda recipe: value_at(recipe, field) > 0, f"{field}={example}")


def takes(field: str, keyword: str) -> Condition:
    """Return the condition that a field's formula has this keyword argument.

    A user's formula counts as having every keyword; `preflight.keyword_arguments` checks it later.
    """

    def formula_takes_keyword(recipe: Recipe) -> bool:
        name = value_at(recipe, field)
        return name is not None and (is_import_path(name) or keyword in formulas(field)[name])

    return Condition((field,), f"set {field} to {either(taking(field, keyword))}", formula_takes_keyword)


def _runs_programs(recipe: Recipe) -> bool:
    """Return whether rewards or the environment may run the policy's programs. User-defined ones may."""
    names = [function.name for function in recipe.reward.functions]
    return any(name == "code" or ":" in name for name in names) or (
        recipe.rollout.environment == "python" or ":" in recipe.rollout.environment
    )


SPIKES = one_of("train.on_spike", "skip", "rollback", "stop")
LOSSES = one_of("loop", "sft", "preference", "reward_model")
RL = one_of("loop", "rl")
ON_POLICY = one_of("loop", "rl", "distillation")
TOKEN_LOSS = one_of("loop", "rl", "sft", "distillation")
SFT = one_of("loop", "sft")
PAIRS = one_of("loop", "preference", "reward_model")
PREFERENCE = one_of("loop", "preference")
LOGPROBS = one_of("loop", "rl", "sft", "preference", "distillation")
TRAINED_LOGPROBS = (
    LOGPROBS,
    Condition(
        ("distillation.loss",),
        "set distillation.loss to sampled_token",
        lambda recipe: recipe.loop != "distillation" or recipe.has_advantages,
    ),
)
NOT_EXACT = Condition(("trainer.exact",), "set trainer.exact to false", lambda recipe: not recipe.trainer.exact)
DISTILLATION = one_of("loop", "distillation", example="loop=distillation distillation.teacher=models/Qwen3-32B")
ADVANTAGES = (
    ON_POLICY,
    Condition(("distillation.loss",), "set distillation.loss to sampled_token", lambda recipe: recipe.has_advantages),
)
TASK_REWARDS = Condition(
    ("distillation.use_task_rewards",),
    "set distillation.use_task_rewards to true",
    lambda recipe: recipe.distillation.use_task_rewards,
    "distillation.use_task_rewards=true",
)
# It also depends on the loop, so it replaces the section's condition on the loop.
REWARDS_TRAINED = Condition(
    ("loop",),
    "set loop to rl, or distillation.use_task_rewards to true in loop distillation",
    lambda recipe: recipe.trains_rewards,
    "loop=rl",
)
DIVERGENCE = one_of("distillation.loss", "top_k", "full_vocabulary")
SAMPLED_TOKEN = one_of("distillation.loss", "sampled_token")
TOP_K = one_of("distillation.loss", "top_k")
TEACHER_PROMPT = non_empty("distillation.teacher_prompt", "'{prompt} {context}'")
SAMPLES = Condition(("data.validation",), "give data.validation", lambda recipe: recipe.has_engine)
ENGINE = (TOKEN_LOSS, SAMPLES)
EVALUATED = Condition(
    ("data.validation", "data.validation_conversations"),
    "give data.validation",
    lambda recipe: bool(recipe.validation_sets),
    "data.validation.heldout=heldout.jsonl",
)
BEST = replace(EVALUATED, holds=lambda recipe: EVALUATED.holds(recipe) or recipe.checkpoint.best is None)
# vLLM ignores top-p, top-k and min-p in greedy sampling.
NOT_GREEDY = Condition(
    ("evaluation.sampling.temperature", "evaluation.samples_per_prompt"),
    "set evaluation.sampling.temperature above 0: greedy sampling takes the most probable token",
    lambda recipe: recipe.evaluation_sampling.temperature > 0,
    "evaluation.sampling.temperature=0.6",
)
# The overrides algorithm.ptx_coefficient=0 and data.ptx=null both disable ptx. Neither needs the other field.
PTX = Condition(
    ("data.ptx",), "give data.ptx", lambda recipe: bool(recipe.data.ptx or not recipe.algorithm.ptx_coefficient)
)
PTX_COEFFICIENT = Condition(
    ("algorithm.ptx_coefficient",),
    "set algorithm.ptx_coefficient above 0",
    lambda recipe: bool(recipe.algorithm.ptx_coefficient or not recipe.data.ptx),
    "algorithm.ptx_coefficient=0.1",
)
GAE = (RL, one_of("algorithm.advantage", "gae", example="algorithm.preset=ppo"))
KL = above_zero("algorithm.kl_coefficient", "0.001")
REFERENCE = (
    one_of("loop", "rl", "preference", "distillation"),
    Condition(
        ("algorithm.kl_coefficient", "preference.loss", "distillation.teacher"),
        "set algorithm.kl_coefficient above 0 in loop rl, preference.loss to dpo, ipo or kto in loop preference, "
        "distillation.teacher to reference in loop distillation",
        lambda recipe: recipe.has_reference,
        "algorithm.kl_coefficient=0.04",
    ),
)
GRPO = one_of("algorithm.advantage", "grpo")
DEVIATION = Condition(
    ("algorithm.normalize_by_std",),
    "set algorithm.normalize_by_std to true: without the division by the deviation, both orders are equal",
    lambda recipe: recipe.algorithm.normalize_by_std,
)
SEQUENCE_MEAN = one_of(
    "algorithm.aggregation", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"
)
LORA = (LOGPROBS, above_zero("lora.rank", "16"))
FILTER = non_empty("algorithm.dynamic_sampling", "[0,1]")
PARK = one_of("rollout.stragglers", "park")
_SEPARATE = "rollout.placement=separate rollout.ranks=4 cluster.ranks_per_node=8"
SEPARATE = one_of("rollout.placement", "separate", example=_SEPARATE)
COLOCATED = one_of("rollout.placement", "colocated")
STALE = Condition(
    ("rollout.placement", "rollout.stragglers"),
    "set rollout.placement to separate, or rollout.stragglers to park",
    lambda recipe: recipe.rollout.placement == "separate" or recipe.rollout.stragglers == "park",
    _SEPARATE,
)
UNPACED = Condition(
    ("rollout.placement", "rollout.max_staleness"),
    "set rollout.max_staleness to 0",
    lambda recipe: not recipe.rollout.is_paced,
)
# Only if engines sample ahead are requests in flight during a reshard.
PACED = Condition(
    ("rollout.placement", "rollout.max_staleness"),
    "set rollout.placement to separate and rollout.max_staleness to at least 1; otherwise no request is interrupted",
    lambda recipe: recipe.rollout.is_paced,
)
SURPLUS = (
    UNPACED,
    Condition(
        ("algorithm.dynamic_sampling", "rollout.stragglers"),
        "give algorithm.dynamic_sampling, or set rollout.stragglers to park or abort",
        lambda recipe: recipe.algorithm.dynamic_sampling is not None or recipe.rollout.stragglers != "wait",
    ),
)
MONITORED = Condition(
    ("monitor.port",), "give monitor.port", lambda recipe: recipe.monitor.port is not None, "monitor.port=9400"
)
REWARD_MODEL = (RL, non_empty("reward.model"))
TURNS = (
    Condition(
        ("algorithm.advantage",),
        "set algorithm.advantage to an estimator that compares rewards: gae has algorithm.gamma instead, "
        "pass_at_k counts passes, and rae has a baseline for each role",
        lambda recipe: recipe.algorithm.advantage not in ("gae", "pass_at_k", "rae"),
    ),
    Condition(
        ("rollout.environment",),
        "set rollout.environment to one with several turns",
        lambda recipe: recipe.rollout.environment != "single_turn",
    ),
    Condition(
        ("rollout.max_turns",),
        "raise rollout.max_turns: there is no second turn",
        lambda recipe: recipe.rollout.turns_of_attempt > 1,
    ),
)
STATES = above_zero("algorithm.state_weight", "1")
NOT_SINGLE_TURN = Condition(
    ("rollout.environment",),
    "set rollout.environment to another",
    lambda recipe: recipe.rollout.environment != "single_turn",
)
AGENTS = ("command", "verifiers", "harbor")
"""Environments with their own agent loop, to which the limits of megarl's loop do not apply. A user's environment
belongs to them only after its import.
"""
AGENT = Condition(
    ("rollout.environment",),
    f"set rollout.environment to {either(AGENTS)}",
    lambda recipe: recipe.rollout.environment in AGENTS or ":" in recipe.rollout.environment,
)
COMMAND = one_of("rollout.environment", "command")
IN_PROCESSES = Condition(
    ("rollout.environment_processes",),
    "leave out rollout.environment_processes, or set it above 0",
    lambda recipe: recipe.rollout.environment_processes != 0,
)
CONTAINER = one_of("rollout.agent.sandbox", "sandbox", "podman", "docker", "apptainer")
LAYERED = one_of("rollout.agent.sandbox", "sandbox", "apptainer")
"""Condition for containers whose new files are in memory."""
NOT_AGENT = Condition(
    ("rollout.environment",),
    "set rollout.environment to another",
    lambda recipe: recipe.rollout.environment not in AGENTS,
)
NOT_COMMAND = Condition(
    ("rollout.environment",),
    "set rollout.environment to another",
    lambda recipe: recipe.rollout.environment != "command",
)
SANDBOX = Condition(
    ("rollout.environment",),
    "put code, or a function of your own, into reward.functions, or set rollout.environment to python",
    lambda recipe: any(_runs_programs(source.recipe) for source in recipe.sources),
)
# A SandboxFusion server has its own isolation and packages.
HERE = Condition(("sandbox.url",), "leave sandbox.url out", lambda recipe: recipe.sandbox.url is None)
MOVING_TEMPERATURE = one_of("rollout.sampling.temperature_schedule", "linear", "cosine")
# Reported if all sources of a mixture override the field, because the recipe's value is then never used.
OVERRIDDEN_BY_ALL_SOURCES = Condition(
    ("mixture",), "remove it from a source; every source has its own", lambda recipe: False
)
CURRICULUM = non_empty("data.curriculum.band")
CORRECTION = non_empty("algorithm.importance_sampling")


def takes_margin(_: str) -> Condition:
    loss = takes("preference.loss", "margin")
    return replace(loss, holds=lambda recipe: recipe.loop == "reward_model" or loss.holds(recipe))


def adam(section: str) -> Condition:
    """Muon uses Adam too, for some parameters."""
    return one_of(f"{section}.name", "adam", "muon")


def muon(section: str) -> Condition:
    return one_of(f"{section.removesuffix('.muon')}.name", "muon")


def decays(section: str) -> Condition:
    return one_of(f"{section}.schedule", "linear", "cosine", "wsd")


def wsd(section: str) -> Condition:
    return one_of(f"{section}.schedule", "wsd")


def no_warmup_ratio(section: str) -> Condition:
    return instead_of(f"{section}.warmup_ratio")
