"""Checks of sizes against the model: parallel sizes, FP8, experts, recomputed modules, positions."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.formulas import either
from megarl.families.shape import ModelShape
from megarl.planner import model_sizes
from megarl.planner.memory.deep_ep import NODE_RANKS, RECEIVED_TOKENS
from megarl.platform import transformer_engine
from megarl.platform.cuda_extensions import deep_ep_fault, runs_on_cpu
from megarl.preflight.registry import checks

checks("trainer")(model_sizes.find_size_faults)


@checks("trainer", training_only=True)
def check_fp8(recipe: Recipe, shape: ModelShape, *, is_start: bool = True) -> Iterator[str]:
    """Yield errors if libraries, GPUs or the model's sizes do not allow FP8 training.

    Without `is_start`, the GPUs of `cluster.gpu_memory_gib` are checked instead of this machine's.
    """
    trainer = recipe.trainer
    is_elsewhere = not is_start and isinstance(recipe.cluster.gpu_memory_gib, str)
    # Without GPUs and Transformer Engine there is no FP8 at all, whatever the other settings.
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
    yield from model_sizes.find_fp8_faults(recipe, shape)


checks("trainer")(model_sizes.find_linear_attention_faults)


@checks("trainer")
def check_experts(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield the errors of settings of experts: parallel sizes, replayed routers, and the dispatcher."""
    trainer = recipe.trainer
    # Megatron-Core requires sequence parallelism if tensor-parallel ranks split experts.
    if shape.num_experts and trainer.tp > 1 and trainer.sequence_parallel is False:
        yield (
            f"trainer.sequence_parallel = False: experts with trainer.tp {trainer.tp} need sequence parallelism; leave "
            "it out"
        )
    if trainer.router_replay and not shape.num_experts:
        yield f"trainer.router_replay = True: a {shape.family} model has no experts; leave it out"
    # Recomputation runs the router again, without the replayed choice.
    if trainer.router_replay and trainer.recompute == "full":
        yield (
            "trainer.router_replay = True: recomputed layers would choose other experts; set "
            "trainer.recompute=selective"
        )
    yield from _find_dispatcher_faults(recipe, shape)
    yield from model_sizes.find_recompute_faults(recipe, shape)


def _find_dispatcher_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of trainer.moe_dispatcher = flex: DeepEP sends tokens to experts."""
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
    # DeepEP supports only these numbers of ranks.
    elif (num_ranks := trainer.etp * trainer.ep) not in RECEIVED_TOKENS:
        yield (
            f"{setting}: DeepEP supports groups of {either([*RECEIVED_TOKENS])} ranks, but trainer.etp {trainer.etp} * "
            f"trainer.ep {trainer.ep} is {num_ranks}; change these sizes, or use alltoall"
        )
    elif (ranks_on_node := min(num_ranks, NODE_RANKS)) > recipe.cluster.ranks_per_node:
        yield (
            f"{setting}: DeepEP expects {ranks_on_node} ranks on a node, but cluster.ranks_per_node = "
            f"{recipe.cluster.ranks_per_node} is less; use alltoall, or lower trainer.ep"
        )
    elif (fault := deep_ep_fault()) is not None:
        yield f"{setting}: DeepEP cannot be used ({fault}); install its package deep_ep, or use alltoall"


@checks("rollout")
def check_positions(recipe: Recipe, shape: ModelShape, *, is_evaluated: bool = True) -> Iterator[str]:
    """Yield an error if prompt and completion exceed the model's max_position_embeddings.

    `is_evaluated`: check completions of evaluations too.
    """
    if not recipe.has_engine:
        return
    # The reward model reads its score at one position after the completion.
    max_new_tokens = shape.max_position_embeddings - recipe.data.max_prompt_tokens - bool(recipe.reward.model)
    sampling_by_field = {"rollout.sampling": recipe.rollout.sampling}
    if is_evaluated:
        sampling_by_field["evaluation.sampling"] = recipe.evaluation_sampling
    for field, sampling in sampling_by_field.items():
        if sampling.max_new_tokens > max_new_tokens:
            yield (
                f"{field}.max_new_tokens = {sampling.max_new_tokens}: exceeds with data.max_prompt_tokens the model's "
                f"{shape.max_position_embeddings} positions; "
                + (f"use at most {max_new_tokens}" if max_new_tokens > 0 else "lower both")
            )
