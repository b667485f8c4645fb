"""Several LoRA adapters in the slots of a live vLLM engine. Each request names its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import LoraConfig
from megarl.engine.parts.trained_adapter import TrainedAdapter
from megarl.reshard.layouts.vllm_slots import AdapterSlots
from megarl.types import Request

BASE = "base"
"""Name, for vLLM's cache, of an adapter that changes nothing."""


class ServedAdapters(TrainedAdapter):
    """LoRA adapters in `num_slots` slots. A reshard writes one further slot. `install` copies it to the others.

    A slot may be written between two steps, while requests use other slots. A name always means the same adapter, so
    its KV cache stays valid, and a reshard drops none.
    """

    keeps_cache = True

    def __init__(self, lora: LoraConfig, num_slots: int) -> None:
        super().__init__(lora)
        self._num_slots = num_slots
        self._slot_of_adapter: dict[str | None, int] = {}
        """Slots of the adapters by name."""

    def arguments(self) -> Mapping[str, Any]:
        return {**super().arguments(), "max_loras": 1 + self._num_slots}

    def build(self, worker: Any, *, is_leader: bool) -> None:
        self.slots = AdapterSlots(worker.get_model(), self._lora.rank, num_further=self._num_slots)

    def install(self, name: str | None, index: int) -> None:
        """Copy the adapter of the last reshard into slot `index`. No request may still use this slot."""
        assert self.slots is not None
        # The slot's former adapter is overwritten, so forget its name.
        self._slot_of_adapter = {
            other_name: slot_index for other_name, slot_index in self._slot_of_adapter.items() if slot_index != index
        }
        self._slot_of_adapter[name] = index
        self.slots.copy_to_further(index)

    def extend_request(self, arguments: dict[str, Any], request: Request | None, weight_version: int) -> None:
        """Select the request's adapter, and separate its cached blocks from those of other adapters."""
        assert self.slots is not None
        if request is None:
            # A prompt to score uses the adapter of the last reshard.
            super().extend_request(arguments, request, weight_version)
            return
        name = request.adapter or BASE
        arguments["lora_request"] = self.slots.further_request(self._slot_of_adapter[request.adapter], name)
        # vLLM 0.30 keys cached blocks by the adapter's name alone. A salt makes the distinction certain.
        arguments["prompt"]["cache_salt"] = name
