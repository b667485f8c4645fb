"""What several fields, the model folder and the data decide together, checked before any process starts.

One page of errors for the recipe, else one for the files: a recipe that cannot run is told first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.config import Recipe
from megarl.model_folder import check_model_folder
from megarl.model_shape import ModelShape, read_model_shape
from megarl.parallel_layout import ParallelLayout
from megarl.recipe import error_page
from megarl.types import ConfigError, DataError


def check(recipe: Recipe) -> ParallelLayout:
    """The layout of a recipe that can run. Raises one ConfigError, or else one DataError, that lists all faults."""
    trainer = recipe.trainer
    dp = recipe.cluster.world_size // (trainer.tp * trainer.pp)
    wrong = [*_ranks(recipe), *_batches(recipe, max(dp, 1)), *_lengths(recipe), *_optimizer(recipe), *_rewards(recipe)]
    broken = [*check_model_folder(recipe.model.path), *_data_files(recipe)]
    if Path(recipe.model.path).is_dir():
        try:
            wrong += _model_fit(recipe, read_model_shape(recipe.model.path))
        except DataError as error:
            broken.insert(0, str(error))
    if wrong:
        raise ConfigError(error_page(f"recipe {recipe.name}", wrong))
    if broken:
        raise DataError(error_page(f"files of recipe {recipe.name}", broken))
    return ParallelLayout(tp=trainer.tp, pp=trainer.pp, dp=dp, rollout_tp=recipe.rollout.tp)


def count_records(recipe: Recipe) -> dict[str, int]:
    """Records of each data file, `train` and the validation names, parsed and rendered as the run will.

    Raises one DataError with the first faulty line of each file.
    """
    from megarl.data.chat import load_tokenizer
    from megarl.data.conversations import read_conversations
    from megarl.data.problems import read_problems

    data, tokenizer = recipe.data, load_tokenizer(recipe.model.path)
    files = [("train", data.train, recipe.loop)] + [(name, path, "rl") for name, path in data.validation.items()]
    counts, broken = {}, []
    for name, path, loop in files:
        try:
            if loop == "rl":
                records = read_problems(
                    path,
                    tokenizer,
                    answer_field=data.answer_field,
                    system_prompt=data.system_prompt,
                    max_prompt_tokens=data.max_prompt_tokens,
                )
            else:
                longest = recipe.trainer.max_tokens_per_microbatch
                records = read_conversations(path, tokenizer, system_prompt=data.system_prompt, max_tokens=longest)
            counts[name] = len(records)
        except DataError as error:
            broken.append(str(error))
    if broken:
        raise DataError(error_page(f"data of recipe {recipe.name}", broken))
    return counts


def _ranks(recipe: Recipe) -> Iterator[str]:
    cluster, trainer, world = recipe.cluster, recipe.trainer, recipe.cluster.world_size
    model_ranks = trainer.tp * trainer.pp
    ranks = f"the {world} ranks (cluster.nodes {cluster.nodes} * cluster.ranks_per_node {cluster.ranks_per_node})"
    if cluster.launcher == "local" and cluster.nodes > 1:
        yield (
            f"cluster.nodes = {cluster.nodes}: cluster.launcher local has this machine only; "
            f"set cluster.nodes=1 cluster.ranks_per_node={world}"
        )
    if world % model_ranks:
        yield (
            f"trainer.tp = {trainer.tp}, trainer.pp = {trainer.pp}: tp * pp = {model_ranks} does not divide {ranks}; "
            f"make tp * pp {_one_of(_divisors(world))}, or have {_around(world, model_ranks)} ranks"
        )
    elif trainer.dp is not None and trainer.dp != world // model_ranks:
        yield (
            f"trainer.dp = {trainer.dp}: {ranks} / (tp {trainer.tp} * pp {trainer.pp}) make "
            f"{world // model_ranks}; set trainer.dp={world // model_ranks}, leave it out, "
            f"or have {trainer.dp * model_ranks} ranks"
        )
    if world % recipe.rollout.tp:
        yield (
            f"rollout.tp = {recipe.rollout.tp}: does not divide {ranks}; "
            f"use {_one_of(_divisors(world))}, or have {_around(world, recipe.rollout.tp)} ranks"
        )
    if trainer.sequence_parallel and trainer.tp == 1:
        yield "trainer.sequence_parallel = True: needs trainer.tp > 1, which is 1; leave it out or raise trainer.tp"


def _batches(recipe: Recipe, dp: int) -> Iterator[str]:
    train = recipe.train
    if recipe.loop == "sft":
        if train.prompts_per_step % dp:
            yield (
                f"train.prompts_per_step = {train.prompts_per_step}: does not divide by the data-parallel size {dp} "
                f"(trainer.dp); use {_around(train.prompts_per_step, dp)}"
            )
        return
    parts, completions = train.updates_per_step * dp, train.prompts_per_step * train.samples_per_prompt
    if completions % parts:
        unit = parts // math.gcd(parts, train.samples_per_prompt)
        yield (
            f"train.prompts_per_step = {train.prompts_per_step}: times train.samples_per_prompt "
            f"{train.samples_per_prompt} makes {completions} completions, not to be divided by train.updates_per_step "
            f"{train.updates_per_step} * dp {dp}; use prompts_per_step {_around(train.prompts_per_step, unit)}"
        )
    if recipe.algorithm.advantage == "grpo" and train.samples_per_prompt < 2:
        yield (
            f"train.samples_per_prompt = {train.samples_per_prompt}: algorithm.advantage grpo compares the completions "
            "of one prompt; use 2 or more"
        )


def _lengths(recipe: Recipe) -> Iterator[str]:
    if recipe.loop != "rl":
        return
    trainer, sampling = recipe.trainer, recipe.rollout.sampling
    longest = recipe.data.max_prompt_tokens + sampling.max_new_tokens
    # Sequence parallelism splits each padded sequence evenly over the tensor-parallel ranks.
    multiple = trainer.tp if trainer.sequence_parallel is not False else 1
    padded = -(-longest // multiple) * multiple
    if trainer.max_tokens_per_microbatch < padded:
        yield (
            f"trainer.max_tokens_per_microbatch = {trainer.max_tokens_per_microbatch}: cannot hold one sequence of "
            f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + rollout.sampling.max_new_tokens "
            f"{sampling.max_new_tokens}; raise it to {padded} or lower those"
        )
    if sampling.temperature == 0:
        yield "rollout.sampling.temperature = 0: all completions of a prompt would be equal; use 1.0, or any above 0"


def _optimizer(recipe: Recipe) -> Iterator[str]:
    optimizer, train = recipe.optimizer, recipe.train
    updates = train.steps * (train.updates_per_step if recipe.loop == "rl" else 1)
    if optimizer.warmup_steps > updates:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps}: the run makes only {updates} updates (train.steps * "
            f"train.updates_per_step in rl); use at most {updates}"
        )
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            f"optimizer.min_learning_rate = {optimizer.min_learning_rate}: is above optimizer.learning_rate "
            f"{optimizer.learning_rate}; lower it"
        )


def _rewards(recipe: Recipe) -> Iterator[str]:
    from megarl.rewards import locate

    for name in recipe.reward.functions:
        try:
            locate(name)
        except ConfigError as error:
            yield str(error)


def _data_files(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    files = [("train", data.train), *((f"validation.{name}", path) for name, path in data.validation.items())]
    for field, path in files:
        if not Path(path).is_file():
            yield f"{path}: data.{field} is not there; give the path of a JSONL file"
        elif not Path(path).stat().st_size:
            yield f"{path}: data.{field} is empty; write one JSON record a line"


def _model_fit(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    for field, tp in (("trainer.tp", recipe.trainer.tp), ("rollout.tp", recipe.rollout.tp)):
        if misfits := _tp_misfits(shape, tp):
            fitting = [size for size in range(1, shape.num_heads + 1) if not _tp_misfits(shape, size)]
            yield f"{field} = {tp}: does not divide the model's {', '.join(misfits)}; use {_one_of(fitting)}"
    if shape.num_layers % recipe.trainer.pp:
        yield (
            f"trainer.pp = {recipe.trainer.pp}: does not divide the model's {shape.num_layers} layers; "
            f"use {_one_of(_divisors(shape.num_layers))}"
        )
    samplings = {"rollout.sampling": recipe.rollout.sampling, "evaluation.sampling": recipe.evaluation_sampling}
    for field, sampling in samplings.items():
        room = shape.max_position_embeddings - recipe.data.max_prompt_tokens
        if sampling.max_new_tokens > room:
            yield (
                f"{field}.max_new_tokens = {sampling.max_new_tokens}: with data.max_prompt_tokens "
                f"{recipe.data.max_prompt_tokens} it exceeds the model's {shape.max_position_embeddings} positions; "
                + (f"use at most {room}" if room > 0 else "lower both")
            )


def _tp_misfits(shape: ModelShape, tp: int) -> list[str]:
    """The sizes of the model that a tensor-parallel size cannot split."""
    misfits = [
        f"{size} {name}"
        for size, name in ((shape.num_heads, "attention heads"), (shape.intermediate_size, "feed-forward channels"))
        if size % tp
    ]
    # Ranks beyond the key-value heads hold copies, as many of each head.
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        misfits.append(f"{shape.num_kv_heads} key-value heads (nor the other way round)")
    return misfits


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _around(value: int, multiple: int) -> str:
    """The multiples next to a value: `28 or 32`."""
    lower = value // multiple * multiple
    return _one_of([size for size in (lower, lower + multiple) if size > 0])


def _one_of(sizes: Sequence[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))
