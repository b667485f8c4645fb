"""The trained LoRA adapter in slots of a live vLLM engine (`lora.sync = adapter`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megarl.config import LoraConfig
from megarl.engine.parts.engine_part import EnginePart
from megarl.reshard.layouts.vllm_adapters import slot_rank
from megarl.reshard.layouts.vllm_slots import AdapterSlots
from megarl.types import Request


class TrainedAdapter(EnginePart):
    """The trained adapter, used by all requests. A reshard writes the adapter's slots, not the weights."""

    # With an adapter, the base weights are sent only once: a sleep must not drop them.
    sleep_reason = "lora.sync = adapter sends the base weights only once"

    def __init__(self, lora: LoraConfig) -> None:
        self._lora = lora
        self.slots: AdapterSlots | None = None
        """The adapter's live slots; None until the model is built."""

    def arguments(self) -> Mapping[str, Any]:
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": slot_rank(self._lora.rank),
            # Without this list, vLLM also makes slots for embeddings, head and routers.
            "lora_target_modules": sorted(set(self._lora.targets)),
        }

    def build(self, worker: Any, *, is_leader: bool) -> None:
        # vLLM captures CUDA graphs after this call, with the addresses of the slots.
        self.slots = AdapterSlots(worker.get_model(), self._lora.rank)

    def activate(self, worker: Any) -> None:
        # Activate after the warm-up, because vLLM removes all adapters when it ends.
        assert self.slots is not None
        self.slots.activate(worker)

    def further_tensors(self) -> Iterable[torch.Tensor]:
        return () if self.slots is None else self.slots.tensors.values()

    def extend_request(self, arguments: dict[str, Any], request: Request | None, weight_version: int) -> None:
        assert self.slots is not None
        arguments["lora_request"] = self.slots.request
