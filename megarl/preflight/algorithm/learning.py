"""Checks of recipe fields that depend on each other (optimizer, algorithm, critic, rewards), and the health rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from megarl.config import AlgorithmConfig, OptimizerConfig, Recipe
from megarl.config.corrections import CORRECTING_LOSSES
from megarl.config.effects import unmet
from megarl.config.formulas import either, taking
from megarl.config.judges import REMEDY, find_recipe_judging
from megarl.config.optimizer_on_host import obstacles
from megarl.config.sections.health import HealthConfig
from megarl.families.model_tensors import list_aliases
from megarl.families.shape import ModelShape, read_model_shape
from megarl.planner.gpus_of_run import ranks_on_cpu
from megarl.preflight.registry import Cost, checks
from megarl.tracking.health import LEARNING_RATE, BrokenRule, unusual_learning_rate, usual_learning_rates
from megarl.tracking.renamed_metrics import renamed_error
from megarl.types import ConfigError, DataError


@checks("optimizer")
def check_optimizers(recipe: Recipe) -> Iterator[str]:
    """Yield the errors of the optimizers of policy and critic, and of a critic's warm-up."""
    train, critic = recipe.train, recipe.critic
    yield from _find_optimizer_faults("optimizer", recipe.optimizer, recipe.trainer.distributed_optimizer)
    yield from _find_host_optimizer_faults(recipe)
    if not recipe.has_critic:
        return
    yield from _find_optimizer_faults("critic.optimizer", critic.optimizer, recipe.trainer.distributed_optimizer)
    if critic.warmup_steps >= train.steps > 0:
        yield (
            f"critic.warmup_steps = {critic.warmup_steps}: no step of train.steps {train.steps} would train the "
            "policy; lower it, or raise train.steps"
        )


@checks("train")
def check_evaluation_only(recipe: Recipe) -> Iterator[str]:
    """Yield an error if a run of 0 steps has nothing to evaluate."""
    if not recipe.train.steps and not (recipe.data.validation or recipe.data.validation_conversations):
        yield (
            "train.steps = 0: the run would only evaluate, but data.validation is missing; give it, or raise "
            "train.steps"
        )


@checks("evaluation")
def check_evaluation(recipe: Recipe) -> Iterator[str]:
    """Yield errors if there are too few attempts for a k of pass@k, or if all attempts would be equal."""
    settings, num_attempts = recipe.evaluation, recipe.evaluation.samples_per_prompt
    if recipe.has_engine and any(k > num_attempts for k in settings.k):
        yield (
            f"evaluation.k = {list(settings.k)}: k attempts cannot be drawn from evaluation.samples_per_prompt "
            f"{num_attempts}; raise the latter to {max(settings.k)}, or lower k"
        )
    # Greedy attempts at a single turn are equal. With an environment, observations may differ.
    is_greedy = recipe.evaluation_sampling.temperature == 0 and recipe.rollout.environment == "single_turn"
    if recipe.has_engine and num_attempts > 1 and is_greedy:
        yield (
            f"evaluation.samples_per_prompt = {num_attempts}: with evaluation.sampling.temperature = 0 all attempts "
            "at a problem are the same; raise the temperature, for example to 0.6, or leave this out"
        )


@checks("rollout")
def check_credit(recipe: Recipe) -> Iterator[str]:
    """Yield an error if an agent's rewards of turns would have no effect, or be summed over the attempt."""
    algorithm, setting = recipe.algorithm, "rollout.agent.credit = by_turn"
    if recipe.rollout.agent.credit != "by_turn":
        return
    if not recipe.trains_rewards:
        yield f"{setting}: loop {recipe.loop} trains no rewards; set credit to attempt"
    elif algorithm.turn_discount is None and algorithm.advantage != "gae":
        yield (
            f"{setting}: algorithm.advantage = {algorithm.advantage} gives all tokens the sum of the turns' rewards; "
            "set algorithm.turn_discount, for example to 1, or set credit to attempt"
        )


@checks("checkpoint", per_run=True)
def check_best_metric(recipe: Recipe) -> Iterator[str]:
    """Yield an error if `checkpoint.best` is not a metric of this run's evaluations."""
    metric, sets = recipe.checkpoint.best, recipe.validation_sets
    if metric is None or not sets:
        return
    metric_parts = metric.split("/")
    if old_name := renamed_error(metric):
        yield f"checkpoint.best = {old_name}"
    elif len(metric_parts) < 3 or metric_parts[0] != "val" or metric_parts[1] not in sets:
        yield (
            f"checkpoint.best = {metric}: is not val/SET/METRIC; SET is {either(sets)}, METRIC is for example accuracy"
        )
    elif "@" in metric:
        yield f"checkpoint.best = {metric}: is written pass_at_4 or majority_at_4; avg@n is accuracy"
    elif fault := _find_metric_fault(recipe, metric_parts[1], "/".join(metric_parts[2:])):
        yield f"checkpoint.best = {metric}: {fault}"


def _find_metric_fault(recipe: Recipe, set_name: str, measure: str) -> str | None:
    """Return why the validation set `set_name` lacks the metric `measure`, like accuracy; None: it has it."""
    set_recipes = [source.recipe for source in recipe.sources if set_name in source.recipe.data.validation]
    if set_name in recipe.data.validation_conversations and not set_recipes:
        return None if measure == "loss" else "conversations are measured by the metric loss only"
    if not recipe.has_engine:
        return None if measure == "accuracy" else "pairs are measured by the metric accuracy only"
    set_faults = [_find_measure_fault(set_recipe, measure) for set_recipe in set_recipes]
    # Several sources may have a set of this name. It is enough if one of them measures the metric.
    return None if None in set_faults else set_faults[0]


def _find_measure_fault(recipe: Recipe, measure: str) -> str | None:
    """Return why a validation set with sampled answers lacks a metric like accuracy; None: it has it."""
    from megarl.rewards import metric_name
    from megarl.rewards.functions.final_answers import find_answer_reader

    functions = recipe.reward.functions
    if measure in ("format_valid", "completion_tokens/mean"):
        return None
    if measure.startswith(tuple(f"reward/{metric_name(function.name)}/" for function in functions)):
        return None
    # Measures by data source need the field in which records name their source.
    if recipe.reward.source_field and (match := re.fullmatch(r"data_source/[^/]+/(.+)", measure)):
        measure = match[1]
    # A measure's confidence bounds (low, high) exist if the measure does.
    measure = re.sub(r"/(low|high)$", "", measure)
    is_judged = find_recipe_judging(recipe) != "none"
    if measure == "reward/mean":
        return None
    if measure == "accuracy":
        return None if is_judged else f"there is no accuracy: no reward function judges the answer; {REMEDY}"
    match = re.fullmatch(r"(pass|majority)_at_(\d+)", measure)
    if not match:
        return (
            "is not measured; measured are reward/mean, accuracy, format_valid, completion_tokens/mean, pass_at_K and "
            "majority_at_K"
        )
    if int(match[2]) not in recipe.evaluation.ks:
        return f"is not estimated; put {match[2]} into evaluation.k"
    if not is_judged:
        return f"is not measured: no reward function judges the answer; {REMEDY}"
    if (
        match[1] == "majority"
        and find_answer_reader([(function.name, function.kwargs) for function in functions]) is None
    ):
        return "no reward function in reward.functions reads final answers, so there is no majority; take pass_at_K"
    return None


@checks("train")
def check_rollbacks(recipe: Recipe) -> Iterator[str]:
    """Yield an error if spikes roll back to a checkpoint, and the run saves none."""
    if recipe.train.on_spike == "rollback" and not recipe.checkpoint.every_steps:
        yield (
            "train.on_spike = rollback: returns to a checkpoint, and checkpoint.every_steps = 0 saves none; set "
            "checkpoint.every_steps, or train.on_spike=skip"
        )


@checks("train")
def check_profiles(recipe: Recipe) -> Iterator[str]:
    """Yield an error for profiles of steps after the run's end, or of memory on CPUs."""
    train = recipe.train
    if late_steps := [step for step in train.profile_steps if step > train.steps]:
        steps = list(train.profile_steps)
        yield f"train.profile_steps = {steps}: the run ends with step {train.steps}; leave out {late_steps}"
    if train.profile_steps and "memory" in train.profile_with and ranks_on_cpu(recipe):
        yield (
            f"train.profile_with = {list(train.profile_with)}: memory takes snapshots of CUDA's allocator, and the "
            "ranks run on CPUs; leave out memory (metrics memory/PHASE_gib are measured on CPUs too)"
        )


def list_update_counts(recipe: Recipe) -> Iterator[tuple[str, OptimizerConfig, int]]:
    """Yield each optimizer's recipe section, settings, and total number of updates."""
    train = recipe.train
    # The policy is not updated while the critic warms up (frozen steps).
    updates = (train.steps - recipe.frozen_steps) * (train.num_updates if recipe.is_on_policy else 1)
    yield "optimizer", recipe.optimizer, updates
    if recipe.has_critic:
        yield "critic.optimizer", recipe.critic.optimizer, train.steps * recipe.critic.updates_per_step


def warn_of_shortened_warmups(recipe: Recipe) -> Iterator[str]:
    """Yield a notice for each warm-up longer than the run, which ends it at the peak rate."""
    for field, optimizer, updates in list_update_counts(recipe):
        if recipe.train.steps and optimizer.warmup_steps > updates:
            yield (
                f"{field}.warmup_steps = {optimizer.warmup_steps}: the run makes only {updates} updates, so the "
                f"warm-up is shortened to {updates}"
            )


@checks("optimizer", per_run=True)
def check_decays(recipe: Recipe) -> Iterator[str]:
    """Yield an error for each final decay (schedule wsd) longer than the updates after the warm-up."""
    for field, optimizer, updates in list_update_counts(recipe):
        updates_after_warmup = updates - optimizer.warmup_updates(updates)
        if recipe.train.steps and optimizer.schedule == "wsd" and (optimizer.decay_steps or 0) > updates_after_warmup:
            yield (
                f"{field}.decay_steps = {optimizer.decay_steps}: the run makes {updates} updates, "
                f"{updates_after_warmup} of them after the warm-up, so the learning rate would fall before its peak is "
                "reached; lower it, shorten the warm-up, or raise train.steps"
            )


def _find_optimizer_faults(field: str, optimizer: OptimizerConfig, is_distributed: bool) -> Iterator[str]:
    """Yield the errors of one optimizer: SGD with sharded state, or a minimum rate above the peak."""
    if optimizer.name == "sgd" and is_distributed:
        yield f"{field}.name = sgd: has no state that could be sharded; set trainer.distributed_optimizer=false"
    low, high = optimizer.min_learning_rate, optimizer.learning_rate
    if low > high:
        yield f"{field}.min_learning_rate = {low}: is above {field}.learning_rate {high}; lower it"


def _find_host_optimizer_faults(recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why the optimizer's state cannot stay in host memory."""
    trainer = recipe.trainer
    if not trainer.optimizer_offload_fraction:
        return
    setting = f"trainer.optimizer_offload_fraction = {trainer.optimizer_offload_fraction:g}"
    yield from (f"{setting}: {obstacle}" for obstacle in obstacles(recipe))
    if "optimizer" in trainer.offload:
        yield (
            f"{setting}: trainer.offload includes optimizer, which moves the optimizer states of all parameters in "
            "each step; leave one of both out"
        )


@checks("model")
def check_head(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield an error if the policy's folder has the wrong head, or cannot get the value head needed by the run."""
    if shape.has_value_head and recipe.loop != "reward_model":
        yield (
            f"model.path = {recipe.model.path}: is a reward model without a language head; set model.path to a "
            "language model, and reward.model or critic.path to this folder"
        )
    is_critic = recipe.has_critic and "critic.path" not in recipe.further_models
    if recipe.loop == "reward_model" or is_critic:
        try:
            shape.with_value_head()
        except DataError as error:
            remedy = " Or set critic.path." if is_critic else ""
            yield f"model.path = {recipe.model.path}: {error}{remedy}"


@checks("lora")
def check_adapters(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield the errors of LoRA: ranks that are too large, and settings that adapters do not support."""
    lora = recipe.lora
    # A rank above the narrowest matrix adds parameters but no expressive power.
    narrowest = min(shape.hidden_size, shape.moe_intermediate_size or shape.intermediate_size)
    if lora.rank > narrowest:
        yield f"lora.rank = {lora.rank}: exceeds the smallest dimension of the model's matrices, {narrowest}; lower it"
    # transformers packs experts in memory, whatever the files' form, so PEFT's names do not depend on the files.
    aliases = list_aliases(replace(shape, packs_experts=False))
    packed_targets = sorted({"gate_up_proj", "down_proj"} & set(lora.targets)) if aliases else []
    if lora.rank and packed_targets:
        yield (
            f"lora.targets: {' and '.join(packed_targets)} of a {shape.family} model are packed experts, and PEFT has "
            "no names for adapters of one; use qkv_proj and o_proj"
        )
    if lora.rank and recipe.optimizer.name == "muon":
        yield (
            f"lora.rank = {lora.rank}: Muon is for whole weights, and adapters are factors of a change; set "
            "optimizer.name=adam, or lora.rank=0"
        )
    if lora.rank and recipe.loop == "reward_model":
        yield f"lora.rank = {lora.rank}: a reward model's new head needs full training; set lora.rank=0"
    if lora.rank and shape.num_experts and recipe.trainer.megatron.get("moe_shared_expert_overlap"):
        yield (
            "trainer.megatron.moe_shared_expert_overlap: its computation bypasses LoRA adapters; remove it, or set "
            "lora.rank=0"
        )


@checks("trackers", Cost.FILES)
def check_trackers(recipe: Recipe, *, is_start: bool, is_trained: bool) -> Iterator[str]:
    """Yield an error for each unusable tracker.

    `is_trained`: trackers are imported. An evaluation uses none, so only their names are checked.
    """
    from megarl.tracking.trackers import check, find_import_path

    # A job's environment variables differ from those of the submitting node.
    runs_here = is_start or recipe.cluster.launcher == "local"
    for name in recipe.trackers:
        try:
            if is_trained:
                check(name, is_here=runs_here)
            else:
                find_import_path(name)
        except ConfigError as error:
            yield str(error)


def _find_reward_order_faults(recipe: Recipe) -> Iterator[str]:
    """Yield errors of algorithm.reward_order = normalize_then_sum: all parts of the reward must be scores of
    functions.
    """
    setting = "algorithm.reward_order = normalize_then_sum"
    algorithm = recipe.algorithm
    if unmet(recipe, "algorithm.reward_order") is not None:
        return  # Another check reports the unmet condition.
    for source in recipe.sources:
        names = [function.name for function in source.recipe.reward.functions]
        if len(names) + (source.recipe.reward.model is not None) < 2:
            yield f"{setting}: there is only one score, {', '.join(names)}; add a reward function, or leave this out"
        if source.recipe.algorithm.overlong_buffer:
            yield (
                f"{setting}: the penalty of algorithm.overlong_buffer is not one of the normalised scores; use the "
                "reward function length instead, or leave one of both out"
            )
    if algorithm.turn_discount is not None:
        yield (
            f"{setting}: algorithm.turn_discount compares returns of turns, which are not scores of reward functions; "
            "leave one of both out"
        )
    if algorithm.state_weight:
        yield (
            f"{setting}: algorithm.state_weight compares returns of turns, which are not scores of reward functions; "
            "leave one of both out"
        )
    if algorithm.kl_coefficient and algorithm.kl_placement == "reward":
        yield (
            f"{setting}: the KL penalty in the reward is not a score of a reward function; set another "
            "algorithm.kl_placement"
        )


def _find_dynamic_sampling_faults(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield an error if the limits of dynamic sampling do not fit its metric."""
    if (sampling_range := algorithm.dynamic_sampling) is None:
        return
    # The spread of a group's rewards has no natural upper limit, so only the lower one is used.
    if algorithm.dynamic_sampling_metric == "reward":
        if sampling_range[0] < 0 or sampling_range[1] != 1:
            yield (
                f"algorithm.dynamic_sampling = {list(sampling_range)}: with algorithm.dynamic_sampling_metric = "
                "reward, the "
                "first number is the smallest accepted spread of a group's rewards (0 or more), and there is no upper "
                f"limit; write [{max(sampling_range[0], 0.0):g}, 1]"
            )
    elif not 0 <= sampling_range[0] < sampling_range[1] <= 1:
        yield (
            f"algorithm.dynamic_sampling = {list(sampling_range)}: give two accuracies between 0 and 1, the lower one "
            "first"
        )


@checks("algorithm")
def check_algorithm(recipe: Recipe) -> Iterator[str]:
    """Yield the errors of settings of the algorithm that contradict each other."""
    algorithm, samples = recipe.algorithm, recipe.train.samples_per_prompt
    # With LoRA, the reference shares the frozen base weights, so no newer policy can replace it.
    if algorithm.reference_update_steps is not None and recipe.lora.rank:
        yield (
            f"algorithm.reference_update_steps = {algorithm.reference_update_steps}: with lora.rank = "
            f"{recipe.lora.rank} the reference model is the policy without its adapters, which cannot be updated; "
            "leave one of both out"
        )
    if recipe.loop == "sft" and algorithm.aggregation == "constant_length":
        yield (
            "algorithm.aggregation = constant_length: divides by the longest completion, but loop sft has none; use "
            "another"
        )
    if not recipe.is_on_policy:
        return
    yield from _find_correction_faults(recipe)
    if algorithm.advantage == "rae" and recipe.loop == "distillation":
        yield (
            "algorithm.advantage = rae: the loop distillation keeps no baselines of roles; set loop=rl, or "
            "algorithm.advantage=grpo"
        )
    if algorithm.state_weight and algorithm.turn_discount is not None:
        yield (
            f"algorithm.state_weight = {algorithm.state_weight:g}: adds to one advantage for the whole sample, but "
            f"algorithm.turn_discount = {algorithm.turn_discount} gives each turn its own; leave one of both out"
        )
    # With k = n there is only one set of k samples, and no other set to compare it with.
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k >= samples:
        yield (
            f"algorithm.pass_k = {algorithm.pass_k}: compares sets of k of a prompt's train.samples_per_prompt "
            f"{samples} completions, so all advantages would be zero; lower it, or sample at least "
            f"{algorithm.pass_k + 1}"
        )
    yield from _find_dynamic_sampling_faults(algorithm)
    if algorithm.reward_order == "normalize_then_sum":
        yield from _find_reward_order_faults(recipe)
    yield from _find_overlong_faults(recipe)
    yield from _find_ptx_faults(recipe)


def _find_correction_faults(recipe: Recipe) -> Iterator[str]:
    """Yield errors of the fields of importance sampling, and of entropy_top_share without the pass it needs."""
    algorithm = recipe.algorithm
    # entropy_top_share needs the trainer's pass before the update. old_logprobs = rollout skips it.
    if algorithm.entropy_top_share is not None and algorithm.old_logprobs == "rollout":
        yield (
            f"algorithm.entropy_top_share = {algorithm.entropy_top_share}: needs entropies computed by the trainer "
            "before the update, but algorithm.old_logprobs = rollout skips this pass; set "
            "algorithm.old_logprobs=trainer"
        )
    if algorithm.importance_sampling and algorithm.policy_loss in CORRECTING_LOSSES:
        yield (
            f"algorithm.importance_sampling = {algorithm.importance_sampling}: algorithm.policy_loss = "
            f"{algorithm.policy_loss} has the ratio to the engine's log-probs, so samples would be corrected twice; "
            "leave out algorithm.importance_sampling, and set algorithm.old_logprobs=rollout"
        )
    elif algorithm.importance_sampling and algorithm.old_logprobs == "rollout":
        yield (
            f"algorithm.importance_sampling = {algorithm.importance_sampling}: corrects from the engine's to the "
            "trainer's log-probs, but the ratio already starts from the engine's; set algorithm.old_logprobs=trainer"
        )
    is_low_used = unmet(recipe, "algorithm.importance_sampling_low") is None
    if is_low_used and algorithm.importance_sampling_low >= algorithm.importance_sampling_high:
        yield (
            f"algorithm.importance_sampling_low = {algorithm.importance_sampling_low}: "
            f"set it below algorithm.importance_sampling_high = {algorithm.importance_sampling_high}"
        )


def _find_overlong_faults(recipe: Recipe) -> Iterator[str]:
    """Yield an error if `algorithm.overlong_buffer` is as long as a completion or an attempt may be."""
    algorithm = recipe.algorithm
    max_new_tokens = recipe.rollout.sampling.max_new_tokens
    if algorithm.overlong_buffer and algorithm.overlong_buffer >= max_new_tokens:
        yield (
            f"algorithm.overlong_buffer = {algorithm.overlong_buffer}: penalises every length up to "
            f"rollout.sampling.max_new_tokens {max_new_tokens}; use fewer tokens, for example DAPO's fifth: "
            f"{max(1, max_new_tokens // 5)}"
        )
    budget = recipe.rollout.budget.sampled_tokens if recipe.rollout.turns_of_attempt > 1 else None
    if algorithm.overlong_buffer and budget is not None and algorithm.overlong_buffer >= budget:
        yield (
            f"algorithm.overlong_buffer = {algorithm.overlong_buffer}: penalises every length up to "
            f"rollout.budget.sampled_tokens {budget}; use fewer tokens"
        )


def _find_ptx_faults(recipe: Recipe) -> Iterator[str]:
    """Yield errors of the conversations trained next to samples (`data.ptx`)."""
    algorithm = recipe.algorithm
    if recipe.data.ptx and algorithm.ptx_conversations < recipe.train.updates_per_step:
        yield (
            f"algorithm.ptx_conversations = {algorithm.ptx_conversations}: each of train.updates_per_step "
            f"{recipe.train.updates_per_step} updates needs at least one; raise it"
        )
    if recipe.data.ptx and recipe.trainer.router_replay:
        yield (
            "trainer.router_replay = True: the conversations of data.ptx were not sampled, so no engine chose experts "
            "for them; leave one of both out"
        )


_REWARD_RULES = ("no_gradient", "constant_reward", "validation_falling")
_SAMPLE_RULES = ("entropy_collapsed",)
"""Health rules disabled for supervised loops, where a falling entropy is desired."""


def select_health_rules(recipe: Recipe) -> HealthConfig:
    """Return the recipe's section `health` with inapplicable rules disabled, by loop and algorithm."""
    disabled_rules = set(recipe.health.off)
    if recipe.loop != "rl":
        disabled_rules.update(_REWARD_RULES)
    if not recipe.is_on_policy:
        disabled_rules.update(_SAMPLE_RULES)
    # Other estimators do not subtract the group's mean, so equal rewards in a group still give a gradient.
    # The keyword `lone_sample` marks the estimators that do.
    group_estimators = {*taking("algorithm.advantage", "lone_sample"), "pass_at_k"}
    if recipe.algorithm.advantage not in group_estimators:
        disabled_rules.add("no_gradient")
    return recipe.health.model_copy(update={"off": tuple(sorted(disabled_rules))})


def updates_like_adam(optimizer: OptimizerConfig) -> bool:
    """Return whether an optimizer's updates are about as large as Adam's at an equal learning rate."""
    if optimizer.name == "muon":
        # An update scaled by 0.2 has the root mean square of Adam's. Half and double count as equal.
        return optimizer.muon.scale == "spectral" and 0.1 <= optimizer.muon.scale_factor <= 0.4
    return optimizer.name == "adam"


def find_unusual_learning_rate(recipe: Recipe, step: int = 0) -> BrokenRule | None:
    """Return the broken health rule if the learning rate is unusual for the model, else None.

    `step` is the last step before the start. Optimizers unlike Adam have a usual range only if the recipe sets one.
    """
    usual_rates = recipe.health.learning_rate
    if (
        LEARNING_RATE in recipe.health.off
        or not recipe.train.steps
        or (usual_rates is None and not updates_like_adam(recipe.optimizer))
    ):
        return None
    if usual_rates is None:
        shape = read_model_shape(recipe.model.folder, recipe.model.override_config)
        usual_rates = usual_learning_rates(shape.hidden_size, has_lora=recipe.lora.rank > 0)
    return unusual_learning_rate(recipe.optimizer.learning_rate, usual_rates, step)
