"""Draft layers: additional layers of a checkpoint with which an engine drafts tokens. Untrained ones are only copied.

A family with draft layers names their kind, an instance of `DraftLayers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from megarl.families.tensors.names import TensorName
from megarl.families.tensors.rules import Rule
from megarl.families.tensors.stacks import Stack

if TYPE_CHECKING:
    from megarl.families.parts import LayerKind
    from megarl.families.shape import ModelShape

DRAFTER = "drafter."
"""Prefix of the draft model's parameters among an engine's parameters."""

PARAMETERS = "mtp."
"""Prefix of the draft layers' parameters in Megatron-Core 0.16.1, named after multi-token prediction (MTP)."""


class DraftLayers(Protocol):
    """Tensors of one kind of draft layers: in checkpoints, in Megatron and in vLLM.

    `model.num_draft_layers` counts trained layers, `model.num_kept_layers` copied layers.
    """

    @property
    def num_layers_field(self) -> str:
        """Field of config.json with the number of draft layers."""
        ...

    @property
    def recipe_field(self) -> str:
        """Recipe field that switches on the training of draft layers, for error messages."""
        ...

    @property
    def copied(self) -> Mapping[str, str]:
        """Tensors of the draft layer that are copies: name without the layer's prefix -> name of the model's tensor."""
        ...

    def has_tensor(self, model: ModelShape, tensor: TensorName) -> bool:
        """Return whether a tensor of the model belongs to its draft layers."""
        ...

    def layer_kind(self, model: ModelShape) -> LayerKind:
        """Return the kind of decoder layer inside each draft layer."""
        ...

    def rules(self, model: ModelShape, model_rules: Iterable[Rule]) -> Iterator[Rule]:
        """Yield the rules of trained draft layers, on the last stage, from the rules of the model's other layers."""
        ...

    def make_draft_stacks(
        self, policy_stacks: Iterable[Stack], draft_tensors: Iterable[str], layer_prefix: str
    ) -> Iterator[Stack]:
        """Yield the parameters of vLLM's draft model, as stacks of the checkpoint's tensors.

        `policy_stacks` are the policy's parameters, `draft_tensors` the names of the draft layers' tensors, with
        `{layer}` for the number. `layer_prefix` begins the names of the policy's layers in the checkpoint.
        """
        ...

    def copies(self, model: ModelShape) -> dict[str, str]:
        """Return the draft layers' copies of other tensors: name of the copy -> name of the original."""
        ...

    def copied_prefixes(self, model: ModelShape) -> tuple[str, ...]:
        """Return the name prefixes of tensors in untrained draft layers."""
        ...
