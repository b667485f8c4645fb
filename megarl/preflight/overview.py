"""Rows of a dry run's table: environment, rewards, algorithm, optimizer, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megarl.config import Recipe
from megarl.config.judges import find_recipe_judging
from megarl.config.sections.distillation import SELF_TEACHERS
from megarl.config.sections.learning import OptimizerConfig
from megarl.planner.recovery import describe_loss
from megarl.preflight.algorithm.learning import list_update_counts


def overview(recipe: Recipe) -> dict[str, str]:
    """Return the rows of a dry run's table, by title. A loop without an engine has fewer rows."""
    rows: dict[str, str] = {}
    if recipe.has_engine:
        rows["environment"] = _describe_sources(recipe, _describe_environment)
        rows["rewards"] = _describe_sources(recipe, _describe_rewards) + _describe_reward_model(recipe)
        rows["KV cache"] = _describe_cache(recipe)
    rows["algorithm"] = ", ".join(_describe_algorithm(recipe))
    for field, optimizer, updates in list_update_counts(recipe):
        name = "learning rate" if field == "optimizer" else "learning rate of the critic"
        rows[name] = _describe_learning_rate(optimizer, updates)
    rows["trackers"] = ", ".join(recipe.trackers) or "none: metrics.jsonl in the run folder"
    rows["evaluation"] = _describe_evaluation(recipe)
    if recipe.train.steps != 0:
        rows["lost rank"] = describe_loss(recipe)
    return rows


def _describe_sources(recipe: Recipe, describe: Callable[[Recipe], str]) -> str:
    """Return a description of all sources. Differing ones follow their sources' names."""
    texts = {source.name: describe(source.recipe) for source in recipe.sources}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def _describe_environment(recipe: Recipe) -> str:
    rollout = recipe.rollout
    program = f" ({' '.join(rollout.agent.command)})" if rollout.environment == "command" else ""
    turns = f", at most {rollout.turns_of_attempt} turns" if rollout.turns_of_attempt > 1 else ""
    return f"{rollout.environment}{program}{turns}"


def _describe_rewards(recipe: Recipe) -> str:
    functions = recipe.reward.functions
    factor = recipe.reward.function_weight
    return ", ".join(f"{function.name} * {factor * function.weight:g}" for function in functions) or "none"


def _describe_reward_model(recipe: Recipe) -> str:
    if (model := recipe.further_models.get("reward.model")) is None:
        return ""
    return f"; reward model {model} * {recipe.reward.model_weight:g}"


def _describe_cache(recipe: Recipe) -> str:
    share = recipe.rollout.gpu_memory_utilization
    if share is not None:
        return f"what is left of {share:g} of a GPU"
    return f"{recipe.rollout.kv_cache_gib:g} GiB a rank"


def _describe_algorithm(recipe: Recipe) -> Iterator[str]:
    """Yield the name of the loss and its further terms (KL, entropy, importance correction)."""
    if recipe.loop == "sft":
        yield "cross-entropy"
    elif recipe.loop in ("preference", "reward_model"):
        yield recipe.preference.loss if recipe.loop == "preference" else "pairwise reward model"
    elif recipe.loop == "distillation":
        yield f"{recipe.distillation.loss} of {_teacher_names(recipe) or 'no teacher'}"
        if recipe.trains_rewards:
            yield f"advantage {recipe.algorithm.advantage} of rewards"
    else:
        yield from _describe_reinforcement(recipe)
    if recipe.lora.rank:
        yield f"LoRA of rank {recipe.lora.rank}" + ", sent alone" * recipe.sends_adapter


def _teacher_names(recipe: Recipe) -> str:
    names = {model: teacher for teacher, model in SELF_TEACHERS.items()} | recipe.teachers
    return ", ".join(names[model] for model in recipe.teacher_models)


def _describe_reinforcement(recipe: Recipe) -> Iterator[str]:
    """Yield the settings of the RL objective, one text each."""
    algorithm = recipe.algorithm
    if algorithm.preset is not None:
        yield f"preset {algorithm.preset}"
    yield f"advantage {algorithm.advantage}"
    yield f"policy loss {algorithm.policy_loss}"
    yield algorithm.aggregation
    if algorithm.kl_coefficient:
        yield f"KL {algorithm.kl_coefficient:g} in the {algorithm.kl_placement}"
    if algorithm.importance_sampling not in (None, "none"):
        yield f"importance sampling {algorithm.importance_sampling}"
    if algorithm.dynamic_sampling is not None:
        yield _describe_trained_groups(recipe, *algorithm.dynamic_sampling)


def _describe_trained_groups(recipe: Recipe, low: float, high: float) -> str:
    """Return, in words, which groups dynamic sampling trains.

    Without dynamic_sampling_metric, groups are compared by accuracy if all their answers have verdicts (right or
    wrong), else by their rewards.
    """
    accuracy_range, reward_spread = f"accuracy between {low:g} and {high:g}", f"rewards spread by more than {low:g}"
    metric = recipe.algorithm.dynamic_sampling_metric
    if metric is not None:
        return f"groups of {accuracy_range if metric == 'accuracy' else reward_spread}"
    verdicts_of_sources = {find_recipe_judging(source.recipe) for source in recipe.sources}
    if verdicts_of_sources == {"declared"}:
        return f"groups of {accuracy_range}"
    if verdicts_of_sources == {"none"}:
        return f"groups of {reward_spread}"
    # Only the first scores show whether all answers of a group have a verdict.
    return f"groups of {accuracy_range}, or without verdicts of {reward_spread}"


def _describe_learning_rate(optimizer: OptimizerConfig, updates: int) -> str:
    warmup = optimizer.warmup_updates(updates)
    end_text = "" if optimizer.schedule == "constant" else f" to {optimizer.min_learning_rate:g}"
    warmup_text = f" after {warmup} of {updates} updates of warm-up" if warmup else ""
    return f"{optimizer.learning_rate:g}, {optimizer.schedule}{end_text}{warmup_text}; {optimizer.name}"


def _describe_evaluation(recipe: Recipe) -> str:
    """Return the row about evaluation: validation sets, steps, attempts per problem, temperature."""
    if not (names := recipe.validation_sets):
        return "none: no data.validation"
    evaluation = recipe.evaluation
    times = [f"every {evaluation.every_steps} steps"] if evaluation.every_steps else []
    times += ["before the first step"] if evaluation.at_start else []
    text = f"{', '.join(names)}: {', '.join([*times, 'after the last'])}"
    if not recipe.has_engine:
        return text
    attempts = evaluation.samples_per_prompt
    temperature = recipe.evaluation_sampling.temperature
    return f"{text}; {attempts} attempt{'s' * (attempts > 1)} a problem, temperature {temperature:g}"
