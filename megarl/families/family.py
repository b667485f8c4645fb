"""The type of a model family's page: architecture in config.json, differences from Llama, tensors of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.families.rules import Rule
    from megarl.families.shape import ModelShape


def no_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return no windows: every layer attends to all earlier tokens."""
    return ()


@dataclass(frozen=True, slots=True)
class Family:
    """One family, defined on its page. `families.FAMILIES` lists it under the `model_type` of config.json."""

    architecture: str
    """The architecture of the family's language models, for example `Qwen3ForCausalLM`. `shape` derives the name for
    reward models."""
    rules: Callable[[ModelShape], tuple[Rule, ...]]
    """Function from a model's shape to the rules of its Megatron parameters, each with its Hugging Face tensors."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases."""
    qk_norm: bool = False
    """Whether each query and key head has an RMSNorm."""
    has_experts: bool = False
    """Whether every feed-forward layer is a mixture of experts."""
    ignored_fields: frozenset[str] = frozenset()
    """Fields of config.json without effect in this family. In other families they are refused."""
    is_quantisable: bool = False
    """Whether `rollout.quantization` is tested with this family: vLLM's quantised weights are written correctly
    (tests/reshard/layouts)."""
    windows: Callable[[Mapping[str, Any], int], tuple[int, ...]] = no_windows
    """Function of config.json and the number of layers: each layer's attention window in tokens, 0 for none. Empty if
    no layer has a window. Raises DataError for windows that transformers and vLLM place differently."""
