"""Parallel sizes of a recipe, and rules about them: whether ranks, batches and lengths fit each other.

`preflight.sizes` checks each recipe by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.formulas import either, taking
from megarl.config.parallel import ParallelConfig
from megarl.config.sections.cluster import NodeGroup
from megarl.config.sections.sampling import SamplingConfig
from megarl.config.sections.trainer import TrainerConfig
from megarl.families.shape import ModelShape
from megarl.rounding import round_up

WHOLE_EXPERTS = "enable_expert_parallel"
"""vLLM's setting that gives each engine rank whole experts."""
_LOWEST_TEMPERATURE = 0.01
"""Lowest sampling temperature above 0. vLLM 0.30 raises lower temperatures to it, with a warning."""


def parallel_of(recipe: Recipe) -> ParallelConfig:
    """Return the parallel sizes of a recipe; the ranks and trainer.tp, pp, cp give the data-parallel size."""
    trainer = recipe.trainer
    return ParallelConfig(
        tp=trainer.tp,
        pp=trainer.pp,
        cp=trainer.cp,
        vpp=trainer.vpp,
        ep=trainer.ep,
        etp=trainer.etp,
        dp=max(recipe.trainer_ranks // (trainer.tp * trainer.pp * trainer.cp), 1),
        rollout_tp=recipe.rollout.tp,
        rollout_ep=has_whole_experts(recipe),
        rollout_ranks=recipe.separate_ranks,
        order=trainer.rank_order,
    )


def has_whole_experts(recipe: Recipe) -> bool:
    return bool(recipe.rollout.vllm.get(WHOLE_EXPERTS, False))


def row_multiple(recipe: Recipe) -> int:
    """Return the tokens that divide each row's length.

    Each context-parallel rank gets two chunks, and tensor-parallel ranks get equal parts of whole blocks.
    """
    trainer = recipe.trainer
    sequence_parts = trainer.tp if trainer.sequence_parallel is not False else 1
    return parallel_of(recipe).sequence_multiple * sequence_parts * trainer.token_block


def align_parallel(recipe: Recipe, shape: ModelShape, parallel: ParallelConfig) -> ParallelConfig:
    """Return the sizes with the rank order that sends least between nodes in a reshard (`trainer.align_ranks`)."""
    if not recipe.trainer.align_ranks:
        return parallel
    # Only a recipe that aligns ranks pays for importing the reshard's cost model.
    from megarl.reshard.forecast.cost_model import order_ranks

    return order_ranks(shape, parallel, ranks_per_node=recipe.cluster.ranks_per_node)


def find_rank_faults(recipe: Recipe) -> Iterator[str]:
    """Yield errors if the trainer's parallel sizes do not fit the number of its ranks."""
    trainer, num_ranks = recipe.trainer, recipe.trainer_ranks
    if placement_faults := [*find_placement_faults(recipe)]:
        # Without a valid placement the number of training ranks is unknown: more errors would mislead.
        yield from placement_faults
        return
    ranks_text = f"the {num_ranks} ranks ({recipe.cluster.rank_product})"
    if recipe.separate_ranks:
        ranks_text = (
            f"the {num_ranks} training ranks ({recipe.cluster.rank_product} - rollout.ranks {recipe.separate_ranks})"
        )
    yield from _find_dense_grid_faults(trainer, num_ranks, ranks_text)
    # Experts have their own grid of ranks (etp * ep * pp), which must divide the same ranks.
    expert_ranks = trainer.etp * trainer.ep * trainer.pp
    if trainer.etp * trainer.ep > 1 and num_ranks % expert_ranks:
        yield (
            f"trainer.etp = {trainer.etp}, trainer.ep = {trainer.ep}, trainer.pp = {trainer.pp}: etp * ep * pp = "
            f"{expert_ranks} does not divide {ranks_text}; make it {either(divisors(num_ranks))}"
        )
    if trainer.vpp > 1 and trainer.pp == 1:
        yield f"trainer.vpp = {trainer.vpp}: needs trainer.pp > 1, which is 1; leave it out or raise trainer.pp"
    if not recipe.separate_ranks and num_ranks % recipe.rollout.tp:
        yield (
            f"rollout.tp = {recipe.rollout.tp}: does not divide {ranks_text}; "
            f"use {either(divisors(num_ranks))}, or have {_nearest_multiples(num_ranks, multiple=recipe.rollout.tp)} "
            "ranks"
        )
    if trainer.sequence_parallel and trainer.tp == 1:
        yield "trainer.sequence_parallel = True: needs trainer.tp > 1, which is 1; leave it out or raise trainer.tp"


def _find_dense_grid_faults(trainer: TrainerConfig, num_ranks: int, ranks_text: str) -> Iterator[str]:
    """Yield an error if tp * pp * cp (times dp) does not fit `num_ranks`. `ranks_text`: these ranks in words."""
    axes = ("tp", "pp", "cp") if trainer.cp > 1 else ("tp", "pp")
    model_ranks = math.prod(getattr(trainer, axis) for axis in axes)
    product_text = " * ".join(axes)
    if num_ranks % model_ranks:
        sizes_text = ", ".join(f"trainer.{axis} = {getattr(trainer, axis)}" for axis in axes)
        yield (
            f"{sizes_text}: {product_text} = {model_ranks} does not divide {ranks_text}; "
            f"make {product_text} {either(divisors(num_ranks))}, or have "
            f"{_nearest_multiples(num_ranks, multiple=model_ranks)} ranks"
        )
    elif trainer.dp is not None and trainer.dp != num_ranks // model_ranks:
        yield (
            f"trainer.dp = {trainer.dp}: {ranks_text} / {product_text} {model_ranks} make "
            f"{num_ranks // model_ranks}; "
            f"set trainer.dp={num_ranks // model_ranks}, leave it out, or have {trainer.dp * model_ranks} ranks"
        )


def find_placement_faults(recipe: Recipe) -> Iterator[str]:
    """Yield errors if separate engines cannot use their ranks, or if they leave no rank to the trainer."""
    cluster, rollout, trainer = recipe.cluster, recipe.rollout, recipe.trainer
    engines = cluster.groups.engines
    if not recipe.has_engine or rollout.placement != "separate":
        if engines is not None:
            yield (
                "cluster.groups.engines: engines have no ranks of their own without rollout.placement = separate; set "
                "rollout.placement=separate, or leave the group out"
            )
        return
    num_ranks, tp, product_text = cluster.world_size, rollout.tp, cluster.rank_product
    fitting_counts = list(range(tp, num_ranks, tp))
    remedy_text = (
        f"use {either(fitting_counts)}" if fitting_counts else f"have more than {tp} ranks (cluster.ranks_per_node)"
    )
    if engines is not None:
        yield from _find_engine_group_faults(recipe, engines)
    elif rollout.ranks is None:
        yield (
            f"rollout.placement = separate: needs rollout.ranks, how many of the {num_ranks} ranks ({product_text}) "
            f"sample; {remedy_text}"
        )
    elif rollout.ranks >= num_ranks:
        yield (
            f"rollout.ranks = {rollout.ranks}: leaves none of the {num_ranks} ranks ({product_text}) to the trainer; "
            f"{remedy_text}"
        )
    elif rollout.ranks % tp:
        yield f"rollout.ranks = {rollout.ranks}: is not a multiple of rollout.tp {tp}, an engine's ranks; {remedy_text}"
    if trainer.router_replay:
        yield (
            "trainer.router_replay = True: an engine's choice of experts stays on its ranks, and with "
            "rollout.placement separate these do not train; leave it out, or set rollout.placement=colocated"
        )


def _find_engine_group_faults(recipe: Recipe, engines: NodeGroup) -> Iterator[str]:
    """Yield an error if engines do not use all ranks of their nodes."""
    rollout = recipe.rollout
    setting = f"cluster.groups.engines = {engines.nodes} nodes of {engines.ranks_per_node} ranks"
    if rollout.ranks not in (None, engines.num_ranks):
        yield f"rollout.ranks = {rollout.ranks}: {setting} make {engines.num_ranks}; leave it out"
    if engines.num_ranks % rollout.tp:
        yield f"rollout.tp = {rollout.tp}: does not divide the {engines.num_ranks} ranks of {setting}; change either"


def find_batch_faults(recipe: Recipe, dp: int) -> Iterator[str]:
    yield from _find_uneven_batches(recipe, dp)
    yield from _find_too_few_samples(recipe)


def _find_uneven_batches(recipe: Recipe, dp: int) -> Iterator[str]:
    """Yield errors if sequences do not divide evenly over updates, ranks and microbatches."""
    train, trainer, is_sampled = recipe.train, recipe.trainer, recipe.is_on_policy
    updates_per_step, samples_per_prompt = (train.updates_per_step, train.samples_per_prompt) if is_sampled else (1, 1)
    num_parts, num_sequences = updates_per_step * dp, train.prompts_per_step * samples_per_prompt
    if num_sequences % num_parts:
        remainder_text = (
            f"times train.samples_per_prompt {samples_per_prompt} makes {num_sequences} completions, which do"
        )
        remainder_text = remainder_text if is_sampled else "does"
        prompts_multiple = num_parts // math.gcd(num_parts, samples_per_prompt)
        yield (
            f"train.prompts_per_step = {train.prompts_per_step}: {remainder_text} not divide by "
            f"{f'train.updates_per_step {updates_per_step} * ' if is_sampled else ''}the data-parallel size {dp} "
            "(trainer.dp); use "
            f"{_nearest_multiples(train.prompts_per_step, multiple=prompts_multiple)}"
        )
    critic_updates = recipe.critic.updates_per_step if recipe.has_critic else 1
    # Checked only if the policy's batch divides. Otherwise the error above changes these numbers anyway.
    if not num_sequences % dp and num_sequences % (critic_updates * dp):
        yield (
            f"critic.updates_per_step = {critic_updates}: times the data-parallel size {dp} does not divide the "
            f"{num_sequences} completions of a step; use {either(divisors(num_sequences // dp))}"
        )
    # Interleaved pipelines of Megatron-Core run groups of pp microbatches.
    if trainer.vpp > 1 and num_sequences // num_parts < trainer.pp:
        yield (
            f"trainer.vpp = {trainer.vpp}: takes trainer.pp {trainer.pp} microbatches at a time, but an update has "
            f"{num_sequences // num_parts} sequences for each data-parallel rank; use larger batches or vpp 1"
        )


def _find_too_few_samples(recipe: Recipe) -> Iterator[str]:
    """Yield errors if a loss or an advantage compares samples, and a step has too few of them."""
    train = recipe.train
    samples_per_prompt = train.samples_per_prompt if recipe.is_on_policy else 1
    num_sequences = train.prompts_per_step * samples_per_prompt
    if recipe.loop == "preference" and recipe.preference.loss == "kto" and train.prompts_per_step < 2:
        yield (
            f"train.prompts_per_step = {train.prompts_per_step}: preference.loss kto estimates the KL from each prompt "
            "with another prompt's answer; use 2 or more"
        )
    advantage = recipe.algorithm.advantage
    # These estimators compare all samples of a step.
    compares_whole_step = advantage in ("reinforce_plus_plus", "global_baseline")
    if recipe.trains_rewards and compares_whole_step and num_sequences < 2:
        yield (
            f"train.prompts_per_step = {train.prompts_per_step}: algorithm.advantage {advantage} compares the samples "
            "of a step, but there is only one; use 2 or more"
        )
    compares_samples = advantage in taking("algorithm.advantage", "lone_sample")
    if recipe.trains_rewards and compares_samples and samples_per_prompt < 2 and recipe.algorithm.lone_sample == "zero":
        yield (
            f"train.samples_per_prompt = {samples_per_prompt}: algorithm.advantage {advantage} compares several "
            "samples; use 2 or more, or set algorithm.lone_sample=reward"
        )


def find_length_faults(recipe: Recipe) -> Iterator[str]:
    """Yield errors if a sequence exceeds a row, or if a sampling temperature is too low to train on."""
    if recipe.is_on_policy:
        yield from _find_row_length_faults(recipe)
        yield from _find_temperature_faults(recipe.rollout.sampling)


def _find_row_length_faults(recipe: Recipe) -> Iterator[str]:
    """Yield errors of sequences longer than a row."""
    trainer, sampling = recipe.trainer, recipe.rollout.sampling
    # The reward model reads its score at one position after the completion.
    longest_tokens = recipe.data.max_prompt_tokens + sampling.max_new_tokens + bool(recipe.reward.model)
    multiple = row_multiple(recipe)
    padded_tokens = round_up(longest_tokens, multiple=multiple)
    if trainer.max_tokens_per_microbatch < padded_tokens:
        yield (
            f"trainer.max_tokens_per_microbatch = {trainer.max_tokens_per_microbatch}: one sequence of "
            f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + rollout.sampling.max_new_tokens "
            f"{sampling.max_new_tokens} does not fit; raise it to {padded_tokens}, or lower these"
        )
    forward_tokens = trainer.max_tokens_per_forward or trainer.max_tokens_per_microbatch
    padded_teacher_tokens = round_up(recipe.teacher_tokens, multiple=multiple)
    if padded_tokens <= trainer.max_tokens_per_microbatch and forward_tokens < padded_teacher_tokens:
        yield (
            f"trainer.max_tokens_per_forward = {forward_tokens}: one sequence of distillation.max_teacher_tokens "
            f"{recipe.teacher_tokens} does not fit; raise it to {padded_teacher_tokens}, or lower "
            "distillation.max_teacher_tokens"
        )


def _find_temperature_faults(sampling: SamplingConfig) -> Iterator[str]:
    """Yield errors of temperatures too low to train on."""
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature = 0: all completions of a prompt would be equal; use 1.0, or any "
            "value above 0"
        )
    lowest_temperatures = {"temperature": sampling.temperature}
    if sampling.temperature_schedule != "constant":
        lowest_temperatures["end_temperature"] = sampling.end_temperature
    for field, temperature in lowest_temperatures.items():
        if 0 < temperature < _LOWEST_TEMPERATURE:
            yield (
                f"rollout.sampling.{field} = {temperature}: the engine would sample at {_LOWEST_TEMPERATURE}, but the "
                f"trainer would compute log-probs at {temperature}; use {_LOWEST_TEMPERATURE} or more"
            )


def divisors(dividend: int, *, limit: int | None = None) -> list[int]:
    return [size for size in range(1, min(dividend, limit or dividend) + 1) if dividend % size == 0]


def _nearest_multiples(value: int, *, multiple: int) -> str:
    """Return the nearest multiples below and above a value, in words: `28 or 32`."""
    lower = value // multiple * multiple
    return either([size for size in (lower, lower + multiple) if size > 0])
