"""Checks of sizes against the model: parallel sizes, FP8, experts, recomputed modules, positions."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.formulas import either
from megarl.config.parallel import FP8_BLOCK
from megarl.families.parts import Latent
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.memory_plan.deep_ep import NODE_RANKS, RECEIVED_TOKENS
from megarl.platform import transformer_engine
from megarl.platform.cuda_extensions import deep_ep_fault, runs_on_cpu
from megarl.preflight.registry import checks
from megarl.preflight.sizes import divisors

_ENGINE_VOCABULARY_MULTIPLE = 64
"""vLLM 0.30 pads the vocabulary to a multiple of this before it splits it over tensor-parallel ranks."""


@checks("trainer")
def model_fit(recipe: Recipe, shape: ModelShape, *, is_sampled: bool = True) -> Iterator[str]:
    trainer, rollout = recipe.trainer, recipe.rollout
    whole_experts = bool(rollout.vllm.get("enable_expert_parallel", False))
    # Megatron-Core pads the vocabulary to a multiple of its tp. vLLM pads it to a fixed multiple for any tp.
    vocabulary = -(-shape.vocab_size // _ENGINE_VOCABULARY_MULTIPLE) * _ENGINE_VOCABULARY_MULTIPLE
    splits = {"trainer.tp": (trainer.tp, True, 0)}
    if is_sampled:
        splits["rollout.tp"] = rollout.tp, whole_experts, vocabulary
    for field, (tp, has_whole_experts, rows) in splits.items():
        if misfits := _tp_misfits(shape, tp, has_whole_experts, rows):
            sizes = range(1, shape.num_heads + 1)
            fitting = [size for size in sizes if not _tp_misfits(shape, size, has_whole_experts, rows)]
            yield f"{field} = {tp}: does not divide the model's {', '.join(misfits)}; use {either(fitting)}"
    if trainer.pp * trainer.vpp > shape.num_layers:
        yield (
            f"trainer.pp = {trainer.pp}: {f'times trainer.vpp {trainer.vpp} ' if trainer.vpp > 1 else ''}exceeds the "
            f"model's {shape.num_layers} layers; lower it"
        )
    # If pp is not last, dense and expert grids must place the stages alike. A dense model's second grid has tp only.
    dense, expert = trainer.tp * trainer.cp, trainer.etp * trainer.ep if shape.num_experts else trainer.tp
    if not trainer.rank_order.endswith("pp") and trainer.pp > 1 and dense != expert:
        yield (
            f"trainer.rank_order = {trainer.rank_order}: Megatron needs tp * cp = {dense} to equal "
            f"{'etp * ep' if shape.num_experts else 'tp'} = {expert}; leave it out or change those"
        )
    for field, size, number, name in (
        ("trainer.ep", trainer.ep, shape.num_experts, "experts"),
        ("trainer.etp", trainer.etp, shape.moe_intermediate_size, "channels of an expert"),
    ):
        if not shape.num_experts and size > 1:
            yield f"{field} = {size}: a {shape.family} model has no experts; leave it out"
        elif number % size:
            yield f"{field} = {size}: does not divide the model's {number} {name}; use {either(divisors(number))}"
    if trainer.etp > 1 and FAMILIES[shape.family].settings(shape).get("add_bias_linear"):
        # Every rank of an expert would add the whole bias before their sum (Megatron-Core 0.16.1).
        yield f"trainer.etp = {trainer.etp}: Megatron-Core cannot split experts with biases; set it to 1"
    if is_sampled and 0 < shape.num_experts < rollout.tp:
        yield f"rollout.tp = {rollout.tp}: vLLM takes at most the model's {shape.num_experts} experts; lower it"


@checks("trainer", training_only=True)
def fp8_fit(recipe: Recipe, shape: ModelShape, *, is_start: bool = True) -> Iterator[str]:
    """Yield errors if installed libraries, GPUs or the model's sizes do not allow FP8 training.

    Without `is_start`, the GPUs named by `cluster.gpu_memory_gib` count instead of this machine's.
    """
    trainer = recipe.trainer
    is_elsewhere = not is_start and isinstance(recipe.cluster.gpu_memory_gib, str)
    if (runs_on_cpu() or not transformer_engine.is_installed()) and not is_elsewhere:
        megatron_formats = [(f"trainer.megatron.{name}", trainer.megatron.get(name)) for name in ("fp8", "fp4")]
        for field, value in (("trainer.fp8", trainer.fp8), *megatron_formats):
            if value not in (None, "none"):
                yield f"{field} = {value}: needs GPUs and Transformer Engine, which this machine lacks; leave it out"
        return
    if trainer.fp8 == "none":
        return
    setting = f"trainer.fp8 = {trainer.fp8}"
    if recipe.model.dtype != "bfloat16":
        yield f"{setting}: needs bfloat16 weights; set model.dtype=bfloat16"
    if recipe.lora.rank:
        yield (
            f"{setting}: adapters of lora.rank = {recipe.lora.rank} are too narrow for FP8 blocks; leave one of both "
            "out"
        )
    yield from fp8_channels(recipe, shape)


def fp8_channels(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield an error if a trained model's hidden channels are not a multiple of the FP8 block size of `trainer.fp8`."""
    trainer = recipe.trainer
    if trainer.fp8 == "none":
        return
    channels = {
        "hidden channels": shape.hidden_size,
        "channels of the queries on a rank": shape.num_heads * shape.head_dim // trainer.tp,
    }
    if isinstance(shape.attention, Latent):
        latent = shape.attention.kv_rank + shape.attention.rotary_channels
        channels["channels of the latent vector of keys and values"] = latent
    if shape.num_experts:
        channels["channels of an expert on a rank"] = shape.moe_intermediate_size // trainer.etp
        channels["channels of the shared expert on a rank"] = shape.shared_intermediate_size // trainer.tp
    if shape.has_dense_layers:
        channels["channels of the feed-forward layer on a rank"] = shape.intermediate_size // trainer.tp
    for name, number in channels.items():
        if number % FP8_BLOCK:
            yield (
                f"trainer.fp8 = {trainer.fp8}: the model's {number} {name} are not a multiple of {FP8_BLOCK}; leave it "
                "out, or use smaller parallel sizes"
            )


@checks("trainer")
def linear_attention_fit(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of parallel sizes that gated delta-nets do not support."""
    linear, trainer = shape.linear_attention, recipe.trainer
    if linear is None:
        return
    if linear.num_key_heads % (trainer.tp * trainer.cp) and linear.num_key_heads % trainer.tp == 0:
        yield (
            f"trainer.cp = {trainer.cp}: context parallelism splits the heads of delta-nets; their "
            f"{linear.num_key_heads // trainer.tp} key heads on a tensor-parallel rank are not a multiple of it; use "
            f"{either(divisors(linear.num_key_heads // trainer.tp))}"
        )
    # Megatron-Core 0.16.1 sums the gradient of their output norm over tensor-parallel ranks only then.
    if trainer.tp > 1 and trainer.sequence_parallel is False:
        yield f"trainer.sequence_parallel = False: delta-nets at trainer.tp {trainer.tp} need it; leave it out"


@checks("trainer")
def expert_fit(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    trainer = recipe.trainer
    # Megatron-Core requires sequence parallelism for experts split by tensor-parallel ranks.
    if shape.num_experts and trainer.tp > 1 and trainer.sequence_parallel is False:
        yield (
            f"trainer.sequence_parallel = False: experts with trainer.tp {trainer.tp} need sequence parallelism; leave "
            "it out"
        )
    if trainer.router_replay and not shape.num_experts:
        yield f"trainer.router_replay = True: a {shape.family} model has no experts; leave it out"
    # Recomputation runs the router a second time and would not see the replayed choice.
    if trainer.router_replay and trainer.recompute == "full":
        yield (
            "trainer.router_replay = True: recomputed layers would choose other experts; set "
            "trainer.recompute=selective"
        )
    yield from _dispatcher(recipe, shape)
    yield from recomputed_modules_fit(recipe, shape)


@checks("trainer", training_only=True)
def mtp_fit(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of the training of layers for multi-token prediction (MTP)."""
    trainer = recipe.trainer
    if not recipe.trains_mtp:
        return
    field = f"trainer.mtp_loss_coefficient = {trainer.mtp_loss_coefficient:g}"
    if problem := shape.mtp_problem:
        yield f"{field}: {problem}; leave it out"
    if recipe.lora.rank:
        yield f"{field}: with lora.rank = {recipe.lora.rank} only adapters are trained; leave one of both out"
    if trainer.router_replay:
        yield f"{field}: the engine records no experts of MTP layers to replay; set trainer.router_replay=false"
    if trainer.fp8 != "none":
        yield f"{field}: not tested with trainer.fp8 = {trainer.fp8}; set trainer.fp8=none"
    # Megatron's router adds these losses to any gradient, and `models.experts` counts layers of the policy only.
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"):
        if trainer.megatron.get(name):
            yield f"trainer.megatron.{name} = {trainer.megatron[name]}: not supported with MTP layers; leave one out"


def _dispatcher(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of sending tokens to experts with DeepEP (trainer.moe_dispatcher flex)."""
    trainer = recipe.trainer
    if trainer.moe_dispatcher != "flex":
        return
    setting = "trainer.moe_dispatcher = flex"
    if not shape.num_experts:
        yield f"{setting}: a {shape.family} model has no experts; leave it out"
    elif trainer.etp * trainer.ep == 1:
        yield (
            f"{setting}: with trainer.ep and trainer.etp 1, each rank has all experts and sends no tokens; leave it "
            "out, or raise trainer.ep"
        )
    elif trainer.megatron.get("moe_shared_expert_overlap"):
        yield f"{setting}: does not support trainer.megatron.moe_shared_expert_overlap; leave one of both out"
    # DeepEP has configurations for these numbers of ranks only.
    elif (num_ranks := trainer.etp * trainer.ep) not in RECEIVED_TOKENS:
        yield (
            f"{setting}: DeepEP supports groups of {either([*RECEIVED_TOKENS])} ranks, but trainer.etp {trainer.etp} * "
            f"trainer.ep {trainer.ep} is {num_ranks}; change these sizes, or use alltoall"
        )
    elif (in_node := min(num_ranks, NODE_RANKS)) > recipe.cluster.ranks_per_node:
        yield (
            f"{setting}: DeepEP expects {in_node} ranks on a node, but cluster.ranks_per_node = "
            f"{recipe.cluster.ranks_per_node} is less; use alltoall, or lower trainer.ep"
        )
    elif (fault := deep_ep_fault()) is not None:
        yield f"{setting}: DeepEP cannot be used ({fault}); install its package deep_ep, or use alltoall"


_NEEDS_EXPERTS = ("moe", "moe_act", "shared_experts")
_NEEDS_TRANSFORMER_ENGINE = ("layernorm", "moe_act")
"""Values of trainer.recompute_modules that need Transformer Engine: Megatron-Core frees the outputs of these modules,
and its own layers cannot."""


def recomputed_modules_fit(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of trainer.recompute_modules: parts that the model or this machine's libraries do not have."""
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
            yield f"{field}: {module} needs Transformer Engine's layers, which are not here; leave it out"
        elif module == "mlp" and not shape.has_dense_layers:
            yield f"{field}: a {shape.family} model has experts in every layer; name moe instead of mlp"
    if trainer.router_replay and "moe" in trainer.recompute_modules:
        yield (
            f"{field}: with trainer.router_replay, recomputed routers would choose other experts; name moe_act instead"
        )


@checks("rollout")
def positions(recipe: Recipe, shape: ModelShape, *, is_evaluated: bool = True) -> Iterator[str]:
    """Yield an error if prompt and completion exceed the model's max_position_embeddings. `is_evaluated`: in
    evaluations too."""
    if not recipe.has_engine:
        return
    room = shape.max_position_embeddings - recipe.data.max_prompt_tokens - bool(recipe.reward.model)
    samplings = {"rollout.sampling": recipe.rollout.sampling}
    if is_evaluated:
        samplings["evaluation.sampling"] = recipe.evaluation_sampling
    for field, sampling in samplings.items():
        if sampling.max_new_tokens > room:
            yield (
                f"{field}.max_new_tokens = {sampling.max_new_tokens}: exceeds with data.max_prompt_tokens the model's "
                f"{shape.max_position_embeddings} positions; " + (f"use at most {room}" if room > 0 else "lower both")
            )


def _tp_misfits(shape: ModelShape, tp: int, whole_experts: bool, vocabulary: int) -> list[str]:
    """Return the model's sizes (heads, channels, ...) that a tensor-parallel size does not divide.

    Experts are left out if they are not split. `vocabulary` is the padded size of the vocabulary, or 0 if the padding
    depends on `tp`.
    """
    sizes = [(shape.num_heads, "attention heads"), (vocabulary, "rows of the vocabulary, padded as vLLM does")]
    if shape.has_dense_layers:
        sizes.append((shape.intermediate_size, "feed-forward channels"))
    if shape.num_experts:
        sizes.append((shape.shared_intermediate_size, "channels of the shared expert"))
        sizes += [] if whole_experts else [(shape.moe_intermediate_size, "channels of an expert")]
    if shape.linear_attention:
        sizes.append((shape.linear_attention.num_key_heads, "key heads of the delta-nets"))
    misfits = [f"{size} {name}" for size, name in sizes if size % tp]
    # With more ranks than key-value heads, each head is copied to an equal number of ranks.
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        misfits.append(f"{shape.num_kv_heads} key-value heads (nor the other way round)")
    return misfits
