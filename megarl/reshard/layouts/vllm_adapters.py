"""Layouts of a LoRA adapter in vLLM's slots, computed from the model's sizes; `layouts.vllm_slots` records them.

A slot is vLLM's tensor for one matrix of an adapter. A fused linear layer such as qkv has one slot A, shared by its
projections, and one slot B for each projection. Slots are split over the engine's ranks like the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megarl.families.lora_rules import adapter_rules, adapter_tensor
from megarl.families.model_tensors import layers_by_template, list_stacks, list_tensors
from megarl.families.tensors.names import TensorName
from megarl.families.tensors.rules import Rule
from megarl.families.tensors.stacks import Stack
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.reshard.world import Holding, Layouts, StoragePattern

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks for which vLLM 0.30 makes slots (`vllm.config.lora.MaxLoRARanks`)."""


def slot_rank(rank: int) -> int:
    """Return the smallest rank in SLOT_RANKS for this LoRA rank. The rest of a slot is zero.

    Raises ValueError if none is large enough.
    """
    if rank > SLOT_RANKS[-1]:
        raise ValueError(f"LoRA rank {rank} exceeds the largest of vLLM's slots, {SLOT_RANKS[-1]}")
    return next(possible for possible in SLOT_RANKS if possible >= rank)


def slot_name(module: str, letter: str, index: int) -> str:
    """Return the name of a slot (vLLM's memory for one matrix of an adapter). `letter` is the matrix, A or B; `index`
    is the part of vLLM's fused module.
    """
    return f"{module}.lora_{letter.lower()}_stacked.{index}"


@dataclass(frozen=True)
class VllmAdapterLayouts(Layouts):
    """Layouts of an adapter of LoRA rank `rank` on the linear layers `targets`, in the slots of all `engine` ranks.

    The projections of a fused linear layer have equal matrices A. Only the first A is stored.
    """

    engine: VllmLayouts
    targets: tuple[str, ...]
    rank: int

    def __len__(self) -> int:
        return len(self.engine)

    @cached_property
    def tensors(self) -> Sequence[TensorName]:
        return tuple(
            tensor
            for tensor in list_tensors(self._rules, self.engine.model)
            if tensor.template in self._weights_by_template
        )

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole matrices by template: A [LoRA rank, in features], B [out features, LoRA rank]."""
        return {
            name: shape for rule in self._rules for name, shape in rule.tensors if name in self._weights_by_template
        }

    def holdings(self, tensor: TensorName) -> tuple[Holding, ...]:
        if tensor.template not in self._holdings_by_template:
            self._holdings_by_template[tensor.template] = tuple(self._holdings(tensor.template))
        return self._holdings_by_template[tensor.template]

    def bytes_on(self, rank: int, itemsize: int) -> int:
        """Return the bytes of a rank's slots, unused parts included."""
        return itemsize * sum(self._numel(template, rank, slot_rank(self.rank)) for template in self.shapes)

    def adapter_bytes_on(self, rank: int, itemsize: int) -> int:
        """Return the bytes of the adapter's numbers in a rank's slots: its parts of the matrices A and B.

        A reshard must send at least these bytes. Unused parts of slots, for adapters of a higher LoRA rank, do not
        count.
        """
        return itemsize * sum(self._numel(template, rank, self.rank) for template in self.shapes)

    def _numel(self, template: str, rank: int, stored_rank: int) -> int:
        """Return the numbers of a matrix in all layers on an engine rank, stored with LoRA rank `stored_rank`."""
        stack, index, letter = self._weights_by_template[template]
        features = self.shapes[template][1 if letter == "A" else 0]
        if _is_split(stack, letter):
            features = self.engine.range_on(stack, stack.parts[index], rank % self.engine.tp)[2]
        return features * stored_rank * len(self._layers[template])

    def _holdings(self, template: str) -> Iterator[Holding]:
        """Yield the boxes of a matrix: one box for all ranks, or one for each rank of a replica.

        Rows of B are as long as the slot's rank, even with a smaller adapter.
        """
        stack, part_index, letter = self._weights_by_template[template]
        shape, world_size = self.shapes[template], len(self.engine)
        slot_pattern = StoragePattern(slot_name(stack.storage.removesuffix(".weight"), letter, part_index))
        if not _is_split(stack, letter):
            width = shape[1] if letter == "A" else slot_rank(self.rank)
            yield Holding((0, 0), shape, range(world_size), slot_pattern, 0, (width, 1))
            return
        for rank in range(self.engine.tp):
            start, stop, padded_length = self.engine.range_on(stack, stack.parts[part_index], rank)
            box_start, box_stop = [0, 0], list(shape)
            box_start[stack.dim], box_stop[stack.dim] = start, stop
            width = padded_length if letter == "A" else slot_rank(self.rank)
            ranks = range(rank, world_size, self.engine.tp)
            yield Holding(tuple(box_start), tuple(box_stop), ranks, slot_pattern, 0, (width, 1))

    @cached_property
    def _rules(self) -> tuple[Rule, ...]:
        return adapter_rules(self.engine.model, self.targets, self.rank)

    @cached_property
    def _layers(self) -> dict[str, tuple[int, ...]]:
        return layers_by_template(self._rules, self.engine.model)

    @cached_property
    def _weights_by_template(self) -> dict[str, tuple[Stack, int, str]]:
        """The adapted weight of each stored matrix by template: fused parameter, index in it, and "A" or "B"."""
        return {
            adapter_tensor(part.tensor, letter): (stack, index, letter)
            for stack in list_stacks(self.engine.model)
            for index, part in enumerate(stack.parts)
            for letter in ("AB" if index == 0 else "B")
            if part.tensor.endswith(".weight")
        }

    @cached_property
    def _holdings_by_template(self) -> dict[str, tuple[Holding, ...]]:
        return {}


def _is_split(stack: Stack, letter: str) -> bool:
    """Return whether a matrix is split over ranks: B with the weight's output features, A with its input features."""
    return letter == ("B" if stack.dim == 0 else "A")
