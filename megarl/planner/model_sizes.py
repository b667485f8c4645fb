"""Rules about sizes and the model: parallel sizes, FP8 blocks, linear attention, recomputed modules.

`preflight.model.model_sizes` checks each recipe by them.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.formulas import either
from megarl.config.parallel import FP8_BLOCK
from megarl.families.parts import Latent
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.planner.sizes import divisors, has_whole_experts
from megarl.platform import transformer_engine
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.rounding import round_up

_ENGINE_VOCABULARY_MULTIPLE = 64
"""vLLM 0.30 pads the vocabulary to a multiple of this before it splits it over tensor-parallel ranks."""
_NEEDS_EXPERTS = ("moe", "moe_act", "shared_experts")
_NEEDS_TRANSFORMER_ENGINE = ("layernorm", "moe_act")
"""Values of trainer.recompute_modules for Transformer Engine only: Megatron-Core frees the outputs of these modules,
and its own layers do not support that.
"""


def find_size_faults(recipe: Recipe, shape: ModelShape, *, is_sampled: bool = True) -> Iterator[str]:
    """Yield errors of parallel sizes that do not divide the model. `is_sampled`: check the engines too."""
    yield from _find_tp_faults(recipe, shape, is_sampled=is_sampled)
    yield from _find_pipeline_faults(recipe, shape)
    yield from _find_expert_faults(recipe, shape)
    tp = recipe.rollout.tp
    if is_sampled and 0 < shape.num_experts < tp:
        yield f"rollout.tp = {tp}: vLLM takes at most the model's {shape.num_experts} experts; lower it"


def _find_tp_faults(recipe: Recipe, shape: ModelShape, *, is_sampled: bool) -> Iterator[str]:
    """Yield an error for each tp that does not divide the model."""
    trainer, rollout = recipe.trainer, recipe.rollout
    # Megatron-Core pads the vocabulary to a multiple of its tp. vLLM pads it to a fixed multiple for any tp.
    engine_vocabulary = round_up(shape.vocab_size, multiple=_ENGINE_VOCABULARY_MULTIPLE)
    tp_of_field = {"trainer.tp": (trainer.tp, True, 0)}
    if is_sampled:
        tp_of_field["rollout.tp"] = rollout.tp, has_whole_experts(recipe), engine_vocabulary
    for field, (tp, whole_experts, padded_vocabulary) in tp_of_field.items():
        if misfits := _list_tp_misfits(shape, tp, whole_experts, vocabulary=padded_vocabulary):
            sizes = range(1, shape.num_heads + 1)
            fitting_sizes = [
                size for size in sizes if not _list_tp_misfits(shape, size, whole_experts, vocabulary=padded_vocabulary)
            ]
            yield f"{field} = {tp}: does not divide the model's {', '.join(misfits)}; use {either(fitting_sizes)}"


def _find_pipeline_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of pipeline stages that have no layer, or whose dense and expert ranks would differ."""
    trainer = recipe.trainer
    if trainer.pp * trainer.vpp > shape.num_layers:
        yield (
            f"trainer.pp = {trainer.pp}: {f'times trainer.vpp {trainer.vpp} ' if trainer.vpp > 1 else ''}exceeds the "
            f"model's {shape.num_layers} layers; lower it"
        )
    # If pp is not last, the dense and the expert grid must put the same ranks on a stage. A dense model's second grid
    # has tp only.
    dense_ranks, expert_ranks = trainer.tp * trainer.cp, trainer.etp * trainer.ep if shape.num_experts else trainer.tp
    if not trainer.rank_order.endswith("pp") and trainer.pp > 1 and dense_ranks != expert_ranks:
        yield (
            f"trainer.rank_order = {trainer.rank_order}: Megatron needs tp * cp = {dense_ranks} to equal "
            f"{'etp * ep' if shape.num_experts else 'tp'} = {expert_ranks}; leave it out or change these sizes"
        )


def _find_expert_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of trainer.ep and trainer.etp."""
    trainer = recipe.trainer
    for field, size, model_size, name in (
        ("trainer.ep", trainer.ep, shape.num_experts, "experts"),
        ("trainer.etp", trainer.etp, shape.moe_intermediate_size, "channels of an expert"),
    ):
        if not shape.num_experts and size > 1:
            yield f"{field} = {size}: a {shape.family} model has no experts; leave it out"
        elif model_size % size:
            fitting_sizes = either(divisors(model_size))
            yield f"{field} = {size}: does not divide the model's {model_size} {name}; use {fitting_sizes}"
    if trainer.etp > 1 and FAMILIES[shape.family].settings(shape).get("add_bias_linear"):
        # Each rank of a split expert would add the whole bias before their sum (Megatron-Core 0.16.1).
        yield f"trainer.etp = {trainer.etp}: Megatron-Core cannot split experts with biases; set it to 1"


def find_fp8_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield an error for each number of channels that blocks of `trainer.fp8` do not divide evenly."""
    trainer = recipe.trainer
    if trainer.fp8 == "none":
        return
    channels_by_part = {
        "hidden channels": shape.hidden_size,
        "channels of the queries on a rank": shape.num_heads * shape.head_dim // trainer.tp,
    }
    if isinstance(shape.attention, Latent):
        latent_channels = shape.attention.kv_rank + shape.attention.rotary_channels
        channels_by_part["channels of the latent vector of keys and values"] = latent_channels
    if shape.num_experts:
        channels_by_part["channels of an expert on a rank"] = shape.moe_intermediate_size // trainer.etp
        channels_by_part["channels of the shared expert on a rank"] = shape.shared_intermediate_size // trainer.tp
    if shape.has_dense_layers:
        channels_by_part["channels of the feed-forward layer on a rank"] = shape.intermediate_size // trainer.tp
    for name, num_channels in channels_by_part.items():
        if num_channels % FP8_BLOCK:
            yield (
                f"trainer.fp8 = {trainer.fp8}: the model's {num_channels} {name} are not a multiple of {FP8_BLOCK}; "
                "leave it out, or use smaller parallel sizes"
            )


def find_linear_attention_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of parallel sizes that the model's linear attention does not support."""
    linear, trainer = shape.linear_attention, recipe.trainer
    if linear is None:
        return
    num_heads = linear.num_split_heads
    if num_heads % (trainer.tp * trainer.cp) and num_heads % trainer.tp == 0:
        yield (
            f"trainer.cp = {trainer.cp}: context parallelism splits the {linear.split_heads}; the "
            f"{num_heads // trainer.tp} heads on a tensor-parallel rank are not a multiple of it; use "
            f"{either(divisors(num_heads // trainer.tp))}"
        )
    if trainer.tp > 1 and trainer.sequence_parallel is False and not linear.sums_norm_gradient:
        yield f"trainer.sequence_parallel = False: {linear.plural} at trainer.tp {trainer.tp} need it; leave it out"


def find_recompute_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of trainer.recompute_modules that this model or this machine's libraries do not support."""
    trainer = recipe.trainer
    if trainer.recompute != "selective":
        return
    field = f"trainer.recompute_modules = {list(trainer.recompute_modules)}"
    if not trainer.recompute_modules:
        yield f"{field}: nothing would be recomputed; name a module, or set trainer.recompute=none"
    for module in trainer.recompute_modules:
        if module in _NEEDS_EXPERTS and not shape.num_experts:
            yield f"{field}: a {shape.family} model has no experts; leave {module} out"
        elif module == "shared_experts" and not shape.shared_intermediate_size:
            yield f"{field}: a {shape.family} model has no shared experts; leave {module} out"
        elif module in _NEEDS_TRANSFORMER_ENGINE and (runs_on_cpu() or not transformer_engine.is_installed()):
            yield f"{field}: {module} needs Transformer Engine's layers, which this machine cannot use; leave it out"
        elif module == "mlp" and not shape.has_dense_layers:
            yield f"{field}: a {shape.family} model has experts in every layer; name moe instead of mlp"
    if trainer.router_replay and "moe" in trainer.recompute_modules:
        yield (
            f"{field}: with trainer.router_replay, recomputed routers would choose other experts; name moe_act instead"
        )


def _list_tp_misfits(shape: ModelShape, tp: int, whole_experts: bool, *, vocabulary: int) -> list[str]:
    """Return in words the model's sizes (heads, channels, ...) not divisible by the tensor-parallel size `tp`.

    `whole_experts`: experts are not split, so their channels are not checked. `vocabulary`: padded rows of the
    vocabulary; 0 if the padding depends on `tp`.
    """
    sizes = [(shape.num_heads, "attention heads"), (vocabulary, "rows of the vocabulary, padded as vLLM does")]
    if shape.has_dense_layers:
        sizes.append((shape.intermediate_size, "feed-forward channels"))
    if shape.num_experts:
        sizes.append((shape.shared_intermediate_size, "channels of the shared expert"))
        sizes += [] if whole_experts else [(shape.moe_intermediate_size, "channels of an expert")]
    if shape.linear_attention:
        sizes.append((shape.linear_attention.num_split_heads, shape.linear_attention.split_heads))
    misfits = [f"{size} {name}" for size, name in sizes if size % tp]
    # If ranks outnumber the key-value heads, each head is copied to an equal number of ranks.
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        misfits.append(f"{shape.num_kv_heads} key-value heads (nor the other way round)")
    return misfits
