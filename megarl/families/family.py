"""A model family: its name in config.json, how its shape differs from Llama's, the tensors of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.families.rules import Rule
    from megarl.families.shape import ModelShape


def switched_on(config: Mapping[str, Any]) -> bool:
    """Whether config.json switches sliding windows on, as Qwen's does."""
    return bool(config.get("use_sliding_window"))


@dataclass(frozen=True, slots=True)
class Family:
    """One family; its page defines it, `families.FAMILIES` lists it under the `model_type` of config.json."""

    architecture: str
    """The architecture of a language model; the same name with a value head is that of a reward model."""
    rules: Callable[[ModelShape], tuple[Rule, ...]]
    """Megatron's parameters of a model of this shape, and the Hugging Face tensors that each is made of."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases."""
    qk_norm: bool = False
    """Whether each head of query and key is normalised."""
    has_experts: bool = False
    """Whether every feed-forward is a mixture of experts."""
    ignored_fields: frozenset[str] = frozenset()
    """Fields of config.json that would be refused in another family and mean nothing in this one."""
    has_windows: Callable[[Mapping[str, Any]], bool] = switched_on
    """Whether a config.json asks for sliding-window attention, which is not supported."""
