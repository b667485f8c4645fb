"""Linear attention: layers with a state per sequence instead of keys and values.

A kind of linear attention is a class with its sizes, like `families.delta_net.DeltaNet`. The planner, the checks and
Megatron's settings call its methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar


class LinearAttention(ABC):
    """The sizes of one kind of linear attention."""

    plural: ClassVar[str]
    """Name of the layers in messages."""
    tensor_part: ClassVar[str]
    """Part of the names of the layer's tensors in checkpoints, and of no other names."""
    megatron_lm_variant: ClassVar[str]
    """Megatron-LM's argument `experimental_attention_variant`."""
    kernels: ClassVar[tuple[str, str]]
    """Module with the GPU kernels, and the package that installs it. Without the package, torch computes the layers."""
    sums_norm_gradient: ClassVar[bool]
    """Whether Megatron sums the output norm's gradient over tensor-parallel ranks even without sequence parallelism."""

    @property
    @abstractmethod
    def num_split_heads(self) -> int:
        """Number of heads that tensor and context parallelism split."""

    @property
    @abstractmethod
    def split_heads(self) -> str:
        """Name of the split heads in messages."""

    @property
    @abstractmethod
    def config_sizes(self) -> Mapping[str, int]:
        """Fields of config.json, with values, that set the shapes of the layer's tensors."""

    @abstractmethod
    def megatron_settings(self) -> dict[str, Any]:
        """Return the layer's sizes as fields of Megatron-Core's TransformerConfig."""

    @abstractmethod
    def count_multiply_adds(self, hidden_size: int) -> int:
        """Return the multiply-adds of one token in a layer: its projections and the update of its state."""

    @abstractmethod
    def saved_numbers_per_token(self, *, in_torch: bool) -> tuple[float, float]:
        """Return how many numbers autograd saves per token of a layer: (in the model's dtype, in float32).

        The layer's norm is not included. `in_torch`: the recurrent state is computed by plain torch, which saves more
        than the kernels.
        """
