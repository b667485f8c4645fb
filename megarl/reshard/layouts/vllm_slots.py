"""The slots of a live vLLM engine for a LoRA adapter, and their layout, recorded from vLLM's own adapter loader.

A slot is vLLM's tensor for one matrix of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megarl.families.lora_rules import adapter_tensor
from megarl.reshard.boxes import Layout
from megarl.reshard.layouts.vllm import DirectWriteError, Recorder
from megarl.reshard.layouts.vllm_adapters import slot_name
from megarl.types import MegarlError

ADAPTER_ID = 1
"""vLLM's number of the trained adapter. It is registered first, so its slot is always 0."""


class AdapterSlots:
    """The slots of the trained adapter in a live vLLM model. `rank` is the LoRA rank; slots may be wider.

    `num_further` more slots follow, for copies of earlier versions of the adapter. The constructor makes the
    projections of a fused layer share one slot for A. Call it before vLLM captures CUDA graphs. Raises MegarlError if
    vLLM is configured for another number of adapters, or has no linear layer for them.
    """

    def __init__(self, model: nn.Module, rank: int, *, num_further: int = 0) -> None:
        """Find the slots of each LoRA module."""
        self.rank, self._num_further = rank, num_further
        self._modules = dict(_modules_with_slots(model))
        if not self._modules:
            raise MegarlError(f"{type(model).__name__}: vLLM has made no slots for LoRA adapters. Please report this.")
        packed_names: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._parts = {
            name: _hugging_face_modules(name, module, packed_names) for name, module in self._modules.items()
        }
        self.tensors: dict[str, Tensor] = {}
        """The slots by name, A [slot rank, in features of this rank] and B [out features of this rank, slot rank]."""
        self._stacked: list[Tensor] = []
        """Slot name -> vLLM's tensor with the slots of all adapters, [adapters, 1, *shape of a slot]."""
        for name, module in self._modules.items():
            # The trainer has one A for a fused layer. vLLM 0.30 would store it once per projection.
            module.lora_a_stacked = (module.lora_a_stacked[0],) * module.n_slices
            slots = {"A": module.lora_a_stacked[:1], "B": module.lora_b_stacked}
            for letter, stacked in slots.items():
                for index, slot in enumerate(stacked):
                    if slot.shape[:2] != (1 + num_further, 1):
                        problem_text = f"vLLM has slots for {slot.shape[0]} adapters, not for {1 + num_further}"
                        raise MegarlError(f"{name}: {problem_text}. Please report this.")
                    self.tensors[slot_name(name, letter, index)] = slot[0, 0]
                    self._stacked.append(slot)

    @cached_property
    def request(self) -> Any:
        """vLLM's reference to the trained adapter. Requests pass it to use the adapter."""
        # Imported only where an engine exists: ranks that only train must not load vLLM.
        from vllm.lora.request import LoRARequest

        return LoRARequest("trained", ADAPTER_ID, "written in place")

    def further_request(self, index: int, name: str) -> Any:
        """Return vLLM's reference to the adapter's copy `index`. `name` is the key of vLLM's cache, so it must be
        unique.
        """
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, ADAPTER_ID + 1 + index, "written in place")

    def activate(self, worker: Any) -> None:
        """Register the adapters in a vLLM worker without loading files. Their slots are zero afterwards."""
        manager = worker.model_runner.lora_manager
        slots = manager._adapter_manager
        # vLLM gives each adapter the first free slot, so register the adapters in the order of their slots.
        for request in (
            self.request,
            *(self.further_request(index, f"further {index}") for index in range(self._num_further)),
        ):
            manager.add_dummy_lora(request, self.rank)
            slots.activate_adapter(request.lora_int_id)
            # vLLM needs these weights only to activate the adapter again. megarl never does this, so they are freed.
            slots.get_adapter(request.lora_int_id).loras.clear()

    @torch.no_grad()
    def copy_to_further(self, index: int) -> None:
        for slot in self._stacked:
            slot[1 + index].copy_(slot[0])

    def record_layout(self, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Layout:
        """Record the layout of the slots. `tensors` maps the names of an adapter's matrices to their shapes.

        vLLM's own code copies the matrices, as meta tensors, into the slots. Live values do not change. Raises
        DirectWriteError naming a matrix without a slot, or a partly filled slot.
        """
        recorder = Recorder(self.tensors.items())
        with recorder:
            matrices_by_name = dict(recorder.sources({name: (shape, dtype) for name, shape in tensors.items()}))
            for name, module in self._modules.items():
                matrices = {
                    letter: [
                        matrices_by_name.pop(adapter_tensor(f"{part}.weight", letter), None)
                        for part in self._parts[name]
                    ]
                    for letter in "AB"
                }
                slot_matrices = [matrices[letter] if module.n_slices > 1 else matrices[letter][0] for letter in "AB"]
                module.set_lora(0, *slot_matrices)
        if matrices_by_name:
            raise DirectWriteError(f"{min(matrices_by_name)}: vLLM has no slot for this matrix of the adapter")
        layout = tuple(recorder.pieces)
        self._check_filled(layout)
        return layout

    def zero_padding(self) -> None:
        for padding in self._padding():
            padding.zero_()

    def _padding(self) -> Iterator[Tensor]:
        for name, slot in self.tensors.items():
            yield slot[self.rank :] if ".lora_a_stacked." in name else slot[:, self.rank :]

    def _check_filled(self, pieces: Layout) -> None:
        """Raise DirectWriteError unless the pieces and the padding cover each slot exactly."""
        num_copied = dict.fromkeys(self.tensors, 0)
        for piece in pieces:
            num_copied[piece.storage] += piece.box.numel
        for (name, slot), padding in zip(self.tensors.items(), self._padding(), strict=True):
            if num_copied[name] + padding.numel() != slot.numel():
                raise DirectWriteError(
                    f"{name}: {num_copied[name]} of {slot.numel()} elements come from the adapter and "
                    f"{padding.numel()} are padding; each must be written exactly once"
                )


@contextmanager
def without_adapters(model: nn.Module | None) -> Iterator[None]:
    """Context in which plain linear layers replace the adapter layers of a vLLM model, as during loading."""
    adapter_layers = [
        (parent, child_name, child)
        for parent in (model.modules() if model is not None else ())
        for child_name, child in parent.named_children()
        if hasattr(child, "lora_a_stacked")
    ]
    for parent, child_name, child in adapter_layers:
        setattr(parent, child_name, child.base_layer)
    try:
        yield
    finally:
        for parent, child_name, child in adapter_layers:
            setattr(parent, child_name, child)


def live_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()}


def _modules_with_slots(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_a_stacked"))


def _hugging_face_modules(name: str, module: Any, packed: Mapping[str, list[str]]) -> list[str]:
    if module.n_slices == 1:
        return [name]
    parent, _, fused_name = name.rpartition(".")
    return [f"{parent}.{projection}" for projection in packed[fused_name]]
