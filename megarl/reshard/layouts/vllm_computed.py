"""Layouts of vLLM's live parameters, computed from the model's sizes.

Every rank thus computes the layouts of all engines, and a plan needs no running rank. `layouts.vllm` records the layout
of a live engine. If the two differ, for example with another vLLM version, the recorded layout is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megarl.families.model_tensors import (
    is_draft_tensor,
    layers_by_template,
    list_draft_stacks,
    list_model_tensors,
    list_rules,
    list_stacks,
    live_name,
    template_shapes,
)
from megarl.families.shape import ModelShape, padded_vocab_size, sizes_of
from megarl.families.tensors.names import TensorName
from megarl.families.tensors.stacks import Part, Stack
from megarl.reshard.boxes import contiguous_strides
from megarl.reshard.world import Holding, Layouts, StoragePattern
from megarl.types import ConfigError


@dataclass(frozen=True)
class VllmLayouts(Layouts):
    """Layouts of `world_size` engine ranks; each `tp` consecutive ranks form an engine.

    Draft layers of `model` are in the engine's draft model. With `ep` (vLLM's `enable_expert_parallel`) a rank has
    whole experts with consecutive numbers. `holdings` raises ConfigError for a size that does not divide.
    """

    model: ModelShape
    tp: int
    world_size: int
    ep: bool = False

    def __len__(self) -> int:
        return self.world_size

    @cached_property
    def tensors(self) -> Sequence[TensorName]:
        return list_model_tensors(self.model)

    def holdings(self, tensor: TensorName) -> tuple[Holding, ...]:
        is_of_drafter = is_draft_tensor(self.model, tensor)
        stack = self._stack_of[is_of_drafter, tensor.template]
        # With expert parallelism, experts on different ranks are different kinds of tensors. Otherwise each rank has a
        # part of every expert.
        owner = self._owner(tensor.expert) if stack.stacks_experts and self.ep else -1
        kind = (is_of_drafter, tensor.template, owner)
        if kind not in self._holdings_by_kind:
            self._holdings_by_kind[kind] = tuple(self._holdings(stack, tensor.template, owner))
        return self._holdings_by_kind[kind]

    def bytes_on(self, rank: int, itemsize: int) -> int:
        """Return the bytes of a rank's live parameters, padding included. `itemsize`: bytes of the model's dtype."""
        return sum(
            prod(shape) * count * (itemsize if stack.dtype == "model" else 4)
            for stack, shape, count in self.stacks_on(rank)
        )

    def stacks_on(self, rank: int) -> Iterator[tuple[Stack, tuple[int, ...], int]]:
        """Yield (fused parameter, shape, count) for each kind of a rank's live parameters.

        `shape` describes one parameter. If the parameter stacks experts, it describes one expert.
        """
        part = rank % self.tp
        for stack, is_of_drafter in self._stacks:
            template = stack.parts[0].tensor
            shape = list(self._shapes[template])
            shape[stack.dim] = sum(self.range_on(stack, piece, part)[2] for piece in stack.parts)
            layers = self._layers[template]
            count = sum(is_draft_tensor(self.model, TensorName(template, layer)) == is_of_drafter for layer in layers)
            if stack.stacks_experts:
                experts_per_rank, remainder = divmod(self.model.num_experts, self.tp)
                count *= experts_per_rank + (part < remainder) if self.ep else self.model.num_experts
            yield stack, tuple(shape), count

    def range_on(self, stack: Stack, part: Part, rank: int) -> tuple[int, int, int]:
        """Return (start, stop, padded length) of a rank's part of a tensor. `rank` counts within the engine, 0 to tp -
        1.
        """
        num_rows, tp = self._shapes[part.tensor][stack.dim], self.tp
        if part.rows is not None:
            first_row, end_row = part.rows
            if (end_row - first_row) % tp:
                raise ConfigError(f"rollout.tp={tp} does not divide the model's {sizes_of(self.model, part.tensor)}.")
            stored_rows = (end_row - first_row) // tp
            return first_row + rank * stored_rows, first_row + (rank + 1) * stored_rows, stored_rows
        if part.split == "copy" or (stack.stacks_experts and self.ep):
            return 0, num_rows, num_rows
        if part.split == "first":
            return 0, num_rows if rank == 0 else 0, num_rows
        if part.split == "heads" and tp > self.model.num_kv_heads and tp % self.model.num_kv_heads == 0:
            # If ranks outnumber the key-value heads, vLLM replicates each head on several neighbouring ranks.
            num_heads, rank = self.model.num_kv_heads, rank // (tp // self.model.num_kv_heads)
            return rank * (num_rows // num_heads), (rank + 1) * (num_rows // num_heads), num_rows // num_heads
        stored_rows = padded_vocab_size(num_rows, 1) if part.split == "vocabulary" else num_rows
        # Attention splits whole heads, so the number of heads must divide, not the number of rows.
        num_units = (
            stored_rows // self.model.head_dim if part.split == "heads" or "q_proj" in part.tensor else stored_rows
        )
        if num_units % tp:
            raise ConfigError(f"rollout.tp={tp} does not divide the model's {sizes_of(self.model, part.tensor)}.")
        stored_rows //= tp
        return min(rank * stored_rows, num_rows), min((rank + 1) * stored_rows, num_rows), stored_rows

    def _holdings(self, stack: Stack, template: str, owner: int) -> Iterator[Holding]:
        """Yield the ranks' parts of a tensor in the stacked parameter.

        `owner`: the only rank with the expert; negative: all ranks.
        """
        for rank in range(self.tp) if owner < 0 else (owner,):
            shape = list(self._shapes[template])
            ranges = [self.range_on(stack, part, rank) for part in stack.parts]
            stored_rows = [stored for _, _, stored in ranges]
            shape[stack.dim] = sum(stored_rows)
            strides = contiguous_strides(shape)
            indices = (index for index, part in enumerate(stack.parts) if part.tensor == template)
            for index in indices:
                start, stop, _ = ranges[index]
                if start == stop:
                    continue
                box_start, box_stop = [0] * len(shape), list(self._shapes[template])
                box_start[stack.dim], box_stop[stack.dim] = start, stop
                first_expert = self._first_expert(owner) if owner >= 0 else 0
                # Experts follow each other in the stacked parameter: a step is a whole expert.
                expert_stride = strides[0] * shape[0] if stack.stacks_experts else 0
                storage_pattern = StoragePattern(stack.storage, 0, first_expert, expert_stride)
                ranks = range(rank, self.world_size, self.tp)
                rows_before = index if stack.alternates else sum(stored_rows[:index])
                offset = rows_before * strides[stack.dim]
                if stack.alternates:
                    strides = tuple(s * len(stored_rows) if dim == stack.dim else s for dim, s in enumerate(strides))
                yield Holding(tuple(box_start), tuple(box_stop), ranks, storage_pattern, offset, strides)

    def _owner(self, expert: int) -> int:
        """Return the engine rank of an expert. As in vLLM, remaining experts go to the first ranks.

        7 experts on 2 ranks: rank 0 has 4.
        """
        experts_per_rank, remainder = divmod(self.model.num_experts, self.tp)
        return (
            expert // (experts_per_rank + 1)
            if expert < remainder * (experts_per_rank + 1)
            else remainder + (expert - remainder * (experts_per_rank + 1)) // experts_per_rank
        )

    def _first_expert(self, rank: int) -> int:
        experts_per_rank, remainder = divmod(self.model.num_experts, self.tp)
        return rank * experts_per_rank + min(rank, remainder)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return template_shapes(self.model)

    @cached_property
    def _stack_of(self) -> dict[tuple[bool, str], Stack]:
        """The stacked vLLM parameter of each tensor. The key is (is a draft layer's tensor, name without numbers)."""
        return {(is_of_drafter, part.tensor): stack for stack, is_of_drafter in self._stacks for part in stack.parts}

    @cached_property
    def _holdings_by_kind(self) -> dict[tuple[bool, str, int], tuple[Holding, ...]]:
        return {}

    @cached_property
    def _stacks(self) -> tuple[tuple[Stack, bool], ...]:
        """All live parameters, fused or not, as pairs (stack, is in the drafter)."""
        layers = self._layers.items()
        names = [
            name
            for name, layer_numbers in layers
            if not is_draft_tensor(self.model, TensorName(name, layer_numbers[0]))
        ]
        fused_stacks = [stack for stack in list_stacks(self.model) if stack.parts[0].tensor in names]
        fused_names = {part.tensor for stack in fused_stacks for part in stack.parts}
        # Tensors without a stack (norms, routers) are stored whole on every rank.
        unfused_names = (name for name in names if name not in fused_names)
        main_stacks = (
            *fused_stacks,
            *(Stack(live_name(name, self.model), 0, (Part(name, "copy"),)) for name in unfused_names),
        )
        return (*((stack, False) for stack in main_stacks), *((stack, True) for stack in list_draft_stacks(self.model)))

    @cached_property
    def _layers(self) -> dict[str, tuple[int, ...]]:
        return layers_by_template(list_rules(self.model), self.model)
