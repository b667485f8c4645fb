"""vLLM's parameters as stacks of Hugging Face tensors, and the stacks common to several families. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

_LAYER = "model.layers.{layer}."


class Part(NamedTuple):
    """A tensor of a stack, or a range of its rows, and its split over the engine's ranks.

    `first`: among the ranks that share an expert, the first has the tensor, all others have zeros.
    """

    tensor: str
    split: Literal["even", "heads", "vocabulary", "copy", "first"]
    rows: tuple[int, int] | None = None
    """First row and end of the range. None: the whole tensor."""


class Stack(NamedTuple):
    """A parameter of vLLM: tensors concatenated along `dim`, or interleaved row by row (`alternates`).

    With `stacks_experts`, an additional first dimension has the rank's experts.
    """

    storage: str
    dim: int
    parts: tuple[Part, ...]
    stacks_experts: bool = False
    dtype: Literal["model", "float32"] = "model"
    """Dtype in vLLM: the model's, or always float32."""
    alternates: bool = False


def standard(model: ModelShape) -> tuple[Stack, ...]:
    """Return the stacks of Llama-like models, dense and with experts, as named by vLLM 0.30."""
    attention, mlp = _LAYER + "self_attn.", _LAYER + "mlp."
    return (
        *(vocabulary(name) for name in ("model.embed_tokens.weight", "lm_head.weight")),
        qkv(attention, "weight"),
        qkv(attention, "bias"),
        row(attention + "o_proj.weight"),
        *feed_forward(mlp),
        *feed_forward(mlp + "shared_expert."),
        *experts(mlp),
    )


def feed_forward(inside: str) -> tuple[Stack, Stack]:
    """Return the stacks of a gated feed-forward layer. `inside` is the prefix of its tensors."""
    return gate_up(inside, inside + "gate_up_proj.weight"), row(inside + "down_proj.weight")


def experts(mlp: str) -> tuple[Stack, Stack]:
    """Return the stacks of the routed experts. `mlp` is the prefix of their layer's tensors."""
    expert, live_prefix = mlp + "experts.{expert}.", mlp + "experts.routed_experts."
    return (
        gate_up(expert, live_prefix + "w13_weight")._replace(stacks_experts=True),
        row(expert + "down_proj.weight", live_prefix + "w2_weight")._replace(stacks_experts=True),
    )


def vocabulary(tensor: str, storage: str | None = None) -> Stack:
    """Return a weight split over the vocabulary, padded at its end."""
    return Stack(storage or tensor, 0, (Part(tensor, "vocabulary"),))


def qkv(attention: str, kind: str, live: str | None = None) -> Stack:
    """Return the fused projection of queries, keys and values. `kind` is weight or bias.

    `attention` is the prefix of the tensors, `live` the prefix of vLLM's parameter if it differs.
    """
    q, k, v = (f"{attention}{letter}_proj.{kind}" for letter in "qkv")
    return Stack(f"{live or attention}qkv_proj.{kind}", 0, (Part(q, "even"), Part(k, "heads"), Part(v, "heads")))


def gate_up(inside: str, storage: str, kind: str = "weight") -> Stack:
    """Return the fused gate and up projections. `inside` is the prefix of their tensors, `kind` is weight or bias."""
    gate, up = (f"{inside}{name}_proj.{kind}" for name in ("gate", "up"))
    return Stack(storage, 0, (Part(gate, "even"), Part(up, "even")))


def row(tensor: str, storage: str | None = None) -> Stack:
    """Return a weight split over its input features."""
    return Stack(storage or tensor, 1, (Part(tensor, "even"),))


def float32(tensor: str) -> Stack:
    """Return a tensor stored whole and in float32 by every rank."""
    return Stack(tensor, 0, (Part(tensor, "copy"),), dtype="float32")
