"""LoRA adapters loaded from folders. A request names its adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllm.lora.request import LoRARequest

from megarl.engine.engine_part import EnginePart
from megarl.engine.trained_adapter import slot_arguments
from megarl.engine.vllm_arguments import REASON_LENGTH
from megarl.types import ConfigError, Request, ServedAdapter


class ServedAdapters(EnginePart):
    """Adapters by their name in requests. Without adapters it refuses requests that name one."""

    def __init__(self, adapters: Mapping[str, ServedAdapter]) -> None:
        self._adapters = adapters
        self._references = {
            name: LoRARequest(name, number, adapter.folder)
            for number, (name, adapter) in enumerate(adapters.items(), 1)
        }

    def arguments(self) -> Mapping[str, Any]:
        return slot_arguments([(adapter.rank, adapter.modules) for adapter in self._adapters.values()])

    def load_files(self, worker: Any) -> None:
        """Load the adapters by vLLM's own loader.

        Raises ConfigError for an adapter that vLLM refuses or would apply partly.
        """
        runner = worker.model_runner
        for name, reference in self._references.items():
            chosen = f"--adapter {name}={reference.lora_path}"
            try:
                runner.add_lora(reference)
            except (ValueError, RuntimeError, KeyError) as error:
                text = re.sub(r"\s+", " ", str(error))[:REASON_LENGTH]
                raise ConfigError(f"{chosen}: vLLM refuses it: {text}") from error
            # vLLM 0.30 loads matrices of a layer without slots, and then leaves them out without an error.
            manager = runner.lora_manager._adapter_manager
            if unused := sorted(manager.get_adapter(reference.lora_int_id).loras.keys() - manager.modules.keys()):
                raise ConfigError(
                    f"{chosen}: vLLM has no slots for {unused[0]} and {len(unused) - 1} other layers; serve the model "
                    "with the adapter merged in"
                )

    def extend_request(self, arguments: dict[str, Any], request: Request | None, weight_version: int) -> None:
        """Add vLLM's reference to the adapter that a request names. Raises KeyError if the engine has no such one."""
        if request is not None and request.sampling.adapter:
            arguments["lora_request"] = self._references[request.sampling.adapter]
