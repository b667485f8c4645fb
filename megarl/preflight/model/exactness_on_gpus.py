"""Operators in which trainer and engine cannot be bit-equal on NVIDIA GPUs, according to the sources of both.

vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT) is compared with Megatron-Core's (`batch_invariant_mode`). megarl has
run neither.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.families.parts import GroupedQuery
from megarl.families.shape import ModelShape

BLOCK = 64
"""Elements of the inner dimension K added at once by Megatron-Core's batch-invariant product in bfloat16."""

UNEQUAL_PRODUCTS = {
    "ada": frozenset({(2048, 6144)}),
    "hopper": frozenset({(12288, 2048), (2048, 6144), (4096, 2048), (151936, 2048), (2048, 2048)}),
    "blackwell": frozenset({(2048, 6144), (4096, 2048), (2048, 2048)}),
    # vLLM 0.32 only. Here some shapes are those of one rank under tensor parallelism.
    "sm120": frozenset(
        {
            (4096, 2048), (2048, 2048), (2560, 9728), (2560, 4096), (4096, 12288), (4096, 4096), (2048, 3072),
            (2048, 768), (2560, 4864), (3072, 2560), (37984, 2560), (768, 2560), (1536, 4096), (4096, 1536),
            (768, 4096),
        }
    ),
}  # fmt: skip
"""Shapes (outputs, inputs) of weights for which vLLM's tuned table has another block size of K than `BLOCK`. Keys are
the table's names of GPU architectures.
"""

OPERATORS = {
    "RMSNorm": "vLLM computes 1 / sqrt(mean + eps), Megatron-Core rsqrt(mean + eps)",
    "the residual addition": "vLLM has one CUDA kernel for sum and norm, Megatron-Core rounds the sum",
    "the rotary embedding": "vLLM's CUDA kernel has rounded cosines and sines, Transformer Engine's float32 angles",
    "attention": (
        "vLLM reads pages of its cache by its own build of FlashAttention, the trainer has another kernel without pages"
    ),
    "SwiGLU": "vLLM has a CUDA kernel, Megatron-Core code compiled by Inductor",
}
"""Reasons why an operator of a dense layer differs."""


def gpu_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield a reason for each operator with different arithmetic on GPUs. The last reason: no operator was ever run
    there.
    """
    for operator, reason in OPERATORS.items():
        yield f"on GPUs {operator} rounds differently: {reason}; train on CPUs"
    if not recipe.rollout.vllm.get("enforce_eager"):
        yield "on GPUs vLLM compiles the model, and the compiled norms are not batch-invariant; train on CPUs"
    if max(recipe.trainer.tp, recipe.rollout.tp) > 1:
        yield (
            f"on GPUs with trainer.tp = {recipe.trainer.tp} and rollout.tp = {recipe.rollout.tp}, sums over ranks have "
            "an order of NCCL's choice in the trainer, and a fixed tree in the engine; train on CPUs"
        )
    for name, size in _list_product_shapes(shape, recipe.rollout.tp).items():
        kinds = [kind for kind, sizes in UNEQUAL_PRODUCTS.items() if size in sizes]
        if kinds:
            yield (
                f"on GPUs of type {', '.join(kinds)}, vLLM's {name} with a weight of {size[0]} x {size[1]} adds in "
                f"other blocks than Megatron-Core's {BLOCK}; train on CPUs"
            )
    yield (
        "the remaining operators (other matrix products, log_softmax) have equal arithmetic by the libraries' sources, "
        "but have never run on a GPU; train on CPUs, in an environment made by VENV=DIR launch/setup.sh cpu"
    )


def _list_product_shapes(shape: ModelShape, tp: int) -> dict[str, tuple[int, int]]:
    """Return the weights' shapes (outputs, inputs) on one of `tp` engine ranks, by the layer's name in vLLM."""
    hidden, attention = shape.hidden_size, shape.attention
    products = {
        "gate_up_proj": (2 * shape.intermediate_size // tp, hidden),
        "down_proj": (hidden, shape.intermediate_size // tp),
        "lm_head": (shape.vocab_size // tp, hidden),
    }
    if isinstance(attention, GroupedQuery):
        # With more ranks than key-value heads, each rank holds a copy of one head.
        heads = attention.num_heads // tp + 2 * max(1, attention.num_kv_heads // tp)
        products["qkv_proj"] = (heads * attention.head_dim, hidden)
        products["o_proj"] = (hidden, attention.num_heads * attention.head_dim // tp)
    return products
