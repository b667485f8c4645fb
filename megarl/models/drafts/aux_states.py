"""Inputs of some policy layers, collected on the last pipeline stage for an EAGLE-3 drafter (arXiv 2503.01840).

Each model chunk captures its own layers' inputs. It sends them on with its hidden states and the states from earlier
chunks. They are detached: no gradient flows back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megarl.models.policy import PolicyModel


class AuxStates:
    """The captured layer inputs of a policy, on one of its chunks. It is the chunk's `StateCarrier`.

    A pass collects states only if `is_collecting` is set before it. `take_states` ends the collection.
    """

    def __init__(self, model: PolicyModel, aux_layers: Sequence[int]) -> None:
        """Observe the layers of `aux_layers` in this chunk. The numbers count from 0 and ascend."""
        layers: Any = model.decoder.layers
        # Megatron numbers layers from 1, over all stages.
        first_layer = layers[0].layer_number - 1
        for layer in aux_layers:
            if first_layer <= layer < first_layer + len(layers):
                layers[layer - first_layer].register_forward_pre_hook(self._capture, with_kwargs=True)
        self.num_received = sum(layer < first_layer for layer in aux_layers)
        self.num_sent = sum(layer < first_layer + len(layers) for layer in aux_layers)
        self.is_collecting = False
        self._states: list[Tensor] = []

    def _capture(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # In the backward pass, recomputed layers run once more; then nothing is collected.
        if self.is_collecting:
            states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self._states.append(states.detach())

    def unpack(self, received: Tensor) -> Tensor:
        # Megatron sets the input before the row is known, so `is_collecting` may still be False.
        if received.dim() == 3:
            return received
        self._states = [*received[1:].detach()]
        return received[0]

    def pack(self, hidden_states: Tensor) -> Tensor:
        states = self.take_states()
        # A stack is a copy, as needed: Megatron frees what it has sent.
        return torch.stack([hidden_states, *states]) if states else hidden_states

    def take_states(self) -> list[Tensor]:
        """Return the states [own tokens, 1, hidden_size] by layer, and end the collection. Empty: the pass collected
        none.
        """
        states, self._states, self.is_collecting = self._states, [], False
        return states
