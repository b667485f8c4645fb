"""A model family: its architecture in config.json, its differences from Llama, the tensors of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.families.rules import Rule
    from megarl.families.shape import ModelShape


def switched_on(config: Mapping[str, Any]) -> bool:
    """Whether config.json enables sliding-window attention by `use_sliding_window`, as Qwen's does."""
    return bool(config.get("use_sliding_window"))


@dataclass(frozen=True, slots=True)
class Family:
    """One family, defined on its page; `families.FAMILIES` lists it under the `model_type` of config.json."""

    architecture: str
    """The architecture of its language models, such as `Qwen3ForCausalLM`; `shape` derives the reward models'."""
    rules: Callable[[ModelShape], tuple[Rule, ...]]
    """Megatron's parameters of a model of this shape, and the Hugging Face tensors that each is made of."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases."""
    qk_norm: bool = False
    """Whether each query and key head has an RMSNorm."""
    has_experts: bool = False
    """Whether every feed-forward layer is a mixture of experts."""
    ignored_fields: frozenset[str] = frozenset()
    """Fields of config.json that are refused in other families and have no effect in this one."""
    is_quantisable: bool = False
    """Whether `rollout.quantization` is known to write what vLLM makes of its weights (tests/reshard/layouts)."""
    has_windows: Callable[[Mapping[str, Any]], bool] = switched_on
    """Whether a config.json asks for sliding-window attention, which is not supported."""
