"""What several fields, the model folder and the data decide together, checked before any process starts.

One page of errors for the recipe, else one for the files: a recipe that cannot run is told first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import Recipe
from megarl.model_folder import check_model_folder
from megarl.model_shape import ModelShape, read_model_shape
from megarl.parallel_layout import ParallelLayout
from megarl.recipe import error_page
from megarl.types import ConfigError, DataError, Problem, TrainingSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from megarl.data.preferences import Answers


def check(recipe: Recipe) -> ParallelLayout:
    """The layout of a recipe that can run. Raises one ConfigError, or else one DataError, that lists all faults."""
    layout = _layout(recipe)
    wrong = [*_machines(recipe), *_ranks(recipe), *_batches(recipe, layout.dp)]
    wrong += [*_lengths(recipe), *_optimizer(recipe), *_rewards(recipe), *_algorithm(recipe)]
    broken = [*check_model_folder(recipe.model.path), *_data_files(recipe)]
    if Path(recipe.model.path).is_dir():
        try:
            shape = read_model_shape(recipe.model.path)
            wrong += [*_model_fit(recipe, shape), *_positions(recipe, shape), *_expert_fit(recipe, shape)]
            layout = layout if wrong else _aligned(recipe, shape, layout)
        except DataError as error:
            broken.insert(0, str(error))
    if wrong:
        raise ConfigError(error_page(f"recipe {recipe.name}", wrong))
    if broken:
        raise DataError(error_page(f"files of recipe {recipe.name}", broken))
    return layout


def check_plan(recipe: Recipe) -> tuple[ModelShape, ParallelLayout]:
    """Shape and layout of a recipe whose weights can be planned: of the model folder, config.json is enough.

    Raises DataError for that file, or one ConfigError that lists all sizes that do not fit.
    """
    shape = read_model_shape(recipe.model.path)
    if wrong := [*_ranks(recipe), *_model_fit(recipe, shape)]:
        raise ConfigError(error_page(f"recipe {recipe.name}", wrong))
    return shape, _aligned(recipe, shape, _layout(recipe))


def _layout(recipe: Recipe) -> ParallelLayout:
    trainer = recipe.trainer
    return ParallelLayout(
        **trainer.model_dump(include={"tp", "pp", "cp", "vpp", "ep", "etp"}),
        dp=max(recipe.cluster.world_size // (trainer.tp * trainer.pp * trainer.cp), 1),
        rollout_tp=recipe.rollout.tp,
        rollout_ep=bool(recipe.rollout.vllm.get("enable_expert_parallel", False)),
        order=trainer.rank_order,
    )


def count_records(recipe: Recipe) -> dict[str, int]:
    """Records of each data file, `train` and the validation names, parsed and rendered as the run will.

    Raises one DataError with the first faulty line of each file.
    """
    from megarl.data.chat import load_tokenizer

    tokenizer = load_tokenizer(recipe.model.path)
    files = {"train": recipe.data.train, **recipe.data.validation}
    counts, broken = {}, []
    for name, path in files.items():
        try:
            if recipe.loop == "preference":
                counts[name] = len(read_preferences(recipe, tokenizer, path))
            elif name == "train" and recipe.loop == "sft":
                counts[name] = len(read_conversations(recipe, tokenizer))
            else:
                counts[name] = len(read_problems(recipe, tokenizer, path))
        except DataError as error:
            broken.append(str(error))
    if broken:
        raise DataError(error_page(f"data of recipe {recipe.name}", broken))
    return counts


def read_problems(recipe: Recipe, tokenizer: Tokenizer, path: str) -> list[Problem]:
    """The problems of a data file, as a run of this recipe renders them; DataError names a faulty line."""
    from megarl.data import problems

    settings = recipe.data.model_dump(include={"answer_field", "system_prompt", "max_prompt_tokens"})
    return problems.read_problems(path, tokenizer, **settings)


def read_conversations(recipe: Recipe, tokenizer: Tokenizer) -> list[TrainingSequence]:
    """The training conversations of a recipe, each fitting a padded row."""
    from megarl.data import conversations

    longest = recipe.trainer.max_tokens_per_microbatch // row_multiple(recipe) * row_multiple(recipe)
    return conversations.read_conversations(
        recipe.data.train, tokenizer, system_prompt=recipe.data.system_prompt, max_tokens=longest
    )


def read_preferences(recipe: Recipe, tokenizer: Tokenizer, path: str) -> list[Answers]:
    """The pairs of a data file, or for kto its judged answers, each fitting a row however it is padded."""
    from megarl.data import preferences

    multiple = row_multiple(recipe)
    longest = recipe.trainer.max_tokens_per_microbatch // multiple * multiple - (2 * multiple if multiple > 1 else 0)
    read = preferences.read_judged if recipe.preference.loss == "kto" else preferences.read_preferences
    return read(path, tokenizer, system_prompt=recipe.data.system_prompt, max_tokens=longest)


def row_multiple(recipe: Recipe) -> int:
    """A row's tokens are padded to a multiple of this: two chunks a context rank, equal parts for tensor ranks."""
    trainer = recipe.trainer
    return _layout(recipe).sequence_multiple * (trainer.tp if trainer.sequence_parallel is not False else 1)


def _aligned(recipe: Recipe, shape: ModelShape, layout: ParallelLayout) -> ParallelLayout:
    if not recipe.trainer.align_ranks:
        return layout
    from megarl.weights.forecast import align

    return align(shape, layout, ranks_per_node=recipe.cluster.ranks_per_node)


def _machines(recipe: Recipe) -> Iterator[str]:
    cluster = recipe.cluster
    if cluster.launcher == "local" and cluster.nodes > 1:
        yield (
            f"cluster.nodes = {cluster.nodes}: cluster.launcher local has this machine only; "
            f"set cluster.nodes=1 cluster.ranks_per_node={cluster.world_size}"
        )


def _ranks(recipe: Recipe) -> Iterator[str]:
    cluster, trainer, world = recipe.cluster, recipe.trainer, recipe.cluster.world_size
    axes = ("tp", "pp", "cp") if trainer.cp > 1 else ("tp", "pp")
    model_ranks = math.prod(getattr(trainer, axis) for axis in axes)
    ranks = f"the {world} ranks (cluster.nodes {cluster.nodes} * cluster.ranks_per_node {cluster.ranks_per_node})"
    if world % model_ranks:
        product = " * ".join(axes)
        sizes = ", ".join(f"trainer.{axis} = {getattr(trainer, axis)}" for axis in axes)
        yield (
            f"{sizes}: {product} = {model_ranks} does not divide {ranks}; "
            f"make {product} {_one_of(_divisors(world))}, or have {_around(world, model_ranks)} ranks"
        )
    elif trainer.dp is not None and trainer.dp != world // model_ranks:
        yield (
            f"trainer.dp = {trainer.dp}: {ranks} / {' * '.join(axes)} {model_ranks} make {world // model_ranks}; "
            f"set trainer.dp={world // model_ranks}, leave it out, or have {trainer.dp * model_ranks} ranks"
        )
    expert_ranks = trainer.etp * trainer.ep * trainer.pp
    if trainer.etp * trainer.ep > 1 and world % expert_ranks:
        yield (
            f"trainer.etp = {trainer.etp}, trainer.ep = {trainer.ep}, trainer.pp = {trainer.pp}: etp * ep * pp = "
            f"{expert_ranks} does not divide {ranks}; make it {_one_of(_divisors(world))}"
        )
    if trainer.vpp > 1 and trainer.pp == 1:
        yield f"trainer.vpp = {trainer.vpp}: needs trainer.pp > 1, which is 1; leave it out or raise trainer.pp"
    if world % recipe.rollout.tp:
        yield (
            f"rollout.tp = {recipe.rollout.tp}: does not divide {ranks}; "
            f"use {_one_of(_divisors(world))}, or have {_around(world, recipe.rollout.tp)} ranks"
        )
    if trainer.sequence_parallel and trainer.tp == 1:
        yield "trainer.sequence_parallel = True: needs trainer.tp > 1, which is 1; leave it out or raise trainer.tp"


def _batches(recipe: Recipe, dp: int) -> Iterator[str]:
    train, trainer, is_rl = recipe.train, recipe.trainer, recipe.loop == "rl"
    updates, samples = (train.updates_per_step, train.samples_per_prompt) if is_rl else (1, 1)
    parts, sequences = updates * dp, train.prompts_per_step * samples
    if sequences % parts:
        made = f"times train.samples_per_prompt {samples} makes {sequences} completions, which do" if is_rl else "does"
        yield (
            f"train.prompts_per_step = {train.prompts_per_step}: {made} not divide by "
            f"{f'train.updates_per_step {updates} * ' if is_rl else ''}the data-parallel size {dp} (trainer.dp); "
            f"use {_around(train.prompts_per_step, parts // math.gcd(parts, samples))}"
        )
    if trainer.vpp > 1 and sequences // parts < trainer.pp:
        yield (
            f"trainer.vpp = {trainer.vpp}: takes trainer.pp {trainer.pp} microbatches at a time, an update has "
            f"{sequences // parts} sequences for each data-parallel rank; use larger batches or vpp 1"
        )
    advantage = recipe.algorithm.advantage
    if is_rl and advantage in ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline") and samples < 2:
        yield f"train.samples_per_prompt = {samples}: algorithm.advantage {advantage} compares several; use 2 or more"


def _lengths(recipe: Recipe) -> Iterator[str]:
    if recipe.loop != "rl":
        return
    trainer, sampling = recipe.trainer, recipe.rollout.sampling
    longest = recipe.data.max_prompt_tokens + sampling.max_new_tokens
    multiple = row_multiple(recipe)
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
        yield f"optimizer.warmup_steps = {optimizer.warmup_steps}: the run makes only {updates} updates; use no more"
    if optimizer.name == "sgd" and recipe.trainer.distributed_optimizer:
        yield "optimizer.name = sgd: has no state to shard; set trainer.distributed_optimizer=false"
    low, high = optimizer.min_learning_rate, optimizer.learning_rate
    if low > high:
        yield f"optimizer.min_learning_rate = {low}: is above optimizer.learning_rate {high}; lower it"


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
    trainer, rollout = recipe.trainer, recipe.rollout
    whole_experts = bool(rollout.vllm.get("enable_expert_parallel", False))
    splits = {"trainer.tp": (trainer.tp, True), "rollout.tp": (rollout.tp, whole_experts)}
    for field, (tp, is_dense) in splits.items():
        if misfits := _tp_misfits(shape, tp, is_dense):
            fitting = [size for size in range(1, shape.num_heads + 1) if not _tp_misfits(shape, size, is_dense)]
            yield f"{field} = {tp}: does not divide the model's {', '.join(misfits)}; use {_one_of(fitting)}"
    if shape.num_layers % (trainer.pp * trainer.vpp):
        yield (
            f"trainer.pp = {trainer.pp}: {f'times trainer.vpp {trainer.vpp} ' if trainer.vpp > 1 else ''}does not "
            f"divide the model's {shape.num_layers} layers; use {_one_of(_divisors(shape.num_layers))}"
        )
    # Without the stages last, Megatron must find the same stages in both its grids; a dense model's second has tp only.
    dense, expert = trainer.tp * trainer.cp, trainer.etp * trainer.ep if shape.num_experts else trainer.tp
    if not trainer.rank_order.endswith("pp") and trainer.pp > 1 and dense != expert:
        yield (
            f"trainer.rank_order = {trainer.rank_order}: Megatron needs tp * cp = {dense} to equal "
            f"{'etp * ep' if shape.num_experts else 'tp'} = {expert}; leave it out or change those"
        )
    for field, size, whole, name in (
        ("trainer.ep", trainer.ep, shape.num_experts, "experts"),
        ("trainer.etp", trainer.etp, shape.moe_intermediate_size, "channels of an expert"),
    ):
        if not shape.num_experts and size > 1:
            yield f"{field} = {size}: a {shape.family} model has no experts; leave it out"
        elif whole % size:
            yield f"{field} = {size}: does not divide the model's {whole} {name}; use {_one_of(_divisors(whole))}"
    if 0 < shape.num_experts < rollout.tp:
        yield f"rollout.tp = {rollout.tp}: vLLM takes at most the model's {shape.num_experts} experts; lower it"


def _algorithm(recipe: Recipe) -> Iterator[str]:
    algorithm, samples = recipe.algorithm, recipe.train.samples_per_prompt
    if recipe.loop == "sft" and algorithm.aggregation == "constant_length":
        yield "algorithm.aggregation = constant_length: divides by the longest completion; sft has none, use another"
    if recipe.loop != "rl":
        return
    if algorithm.correction and algorithm.old_logprobs == "rollout":
        yield (
            f"algorithm.correction = {algorithm.correction}: corrects from the engine to the trainer, but the ratio "
            "starts from the engine's log-probs; set algorithm.old_logprobs=trainer"
        )
    if algorithm.correction and algorithm.correction_low >= algorithm.correction_high:
        yield f"algorithm.correction_low = {algorithm.correction_low}: set it below {algorithm.correction_high} (_high)"
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k > samples:
        yield f"algorithm.pass_k = {algorithm.pass_k}: exceeds train.samples_per_prompt {samples}; lower it"
    for name in ("dual_clip", "largest_ratio"):
        if getattr(algorithm, name) is not None and algorithm.policy_loss != "clipped":
            yield f"algorithm.{name}: policy_loss {algorithm.policy_loss} has none; leave it out"
    if (allowed := algorithm.filter_range) and not 0 <= allowed[0] < allowed[1] <= 1:
        yield f"algorithm.filter_range = {list(allowed)}: give two accuracies between 0 and 1, the lower one first"
    if algorithm.oversampling > 1 and not allowed:
        yield f"algorithm.oversampling = {algorithm.oversampling}: without algorithm.filter_range nothing is filtered"
    if algorithm.kl_target and not algorithm.kl_coefficient:
        yield f"algorithm.kl_target = {algorithm.kl_target}: adapts algorithm.kl_coefficient, which is 0; raise that"


def _expert_fit(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    trainer = recipe.trainer
    if shape.num_experts and trainer.tp > 1 and trainer.sequence_parallel is False:
        yield f"trainer.sequence_parallel = False: experts at trainer.tp {trainer.tp} need it; leave it out"
    if trainer.router_replay and (not shape.num_experts or recipe.loop != "rl"):
        yield "trainer.router_replay = True: replays what an engine chose in rl for a model with experts; leave it out"
    if trainer.router_replay and trainer.recompute == "full":
        yield "trainer.router_replay = True: layers computed anew would choose anew; set trainer.recompute=selective"


def _positions(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    room = shape.max_position_embeddings - recipe.data.max_prompt_tokens
    samplings = {"rollout.sampling": recipe.rollout.sampling, "evaluation.sampling": recipe.evaluation_sampling}
    for field, sampling in samplings.items():
        if sampling.max_new_tokens > room:
            yield (
                f"{field}.max_new_tokens = {sampling.max_new_tokens}: exceeds with data.max_prompt_tokens the model's "
                f"{shape.max_position_embeddings} positions; " + (f"use at most {room}" if room > 0 else "lower both")
            )


def _tp_misfits(shape: ModelShape, tp: int, whole_experts: bool) -> list[str]:
    """The sizes of the model that a tensor-parallel size cannot split; experts only where they are not whole."""
    sizes = [(shape.num_heads, "attention heads")]
    if not shape.num_experts:
        sizes.append((shape.intermediate_size, "feed-forward channels"))
    else:
        sizes.append((shape.shared_intermediate_size, "channels of the shared expert"))
        sizes += [] if whole_experts else [(shape.moe_intermediate_size, "channels of an expert")]
    misfits = [f"{size} {name}" for size, name in sizes if size % tp]
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


def _one_of(choices: Sequence[int | str]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, choices[:-1])), str(choices[-1])]))
