"""FP8 weights and FP8 keys and values in a vLLM engine (`rollout.quantization`, `rollout.kv_cache_dtype`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megarl.engine.parts.engine_part import EnginePart

VLLM_QUANTIZATION = {"fp8": "fp8_per_block", "fp8_per_channel": "fp8_per_channel"}
"""vLLM's setting `quantization` by `rollout.quantization`. vLLM quantises weights during loading, with one scale per
block of 128 x 128 or per row.
"""
ROUTERS = "*.mlp.gate"
"""Pattern of the names of MoE routers, which vLLM must not quantise."""


class QuantisedWeights(EnginePart):
    """Weights quantised by vLLM. `scheme` is a value of `rollout.quantization` other than `none`."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme

    def arguments(self) -> Mapping[str, Any]:
        # vLLM would also quantise the routers of some families, which would then choose other experts than the
        # trainer's.
        return {"quantization": VLLM_QUANTIZATION[self._scheme], "quantization_config": {"ignore": [ROUTERS]}}


class QuantisedCache(EnginePart):
    """KV cache of another dtype than the model's. `dtype` is a value of `rollout.kv_cache_dtype` except auto."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def arguments(self) -> Mapping[str, Any]:
        return {"kv_cache_dtype": self._dtype}

    def find_refused_field(self, text: str) -> str | None:
        # vLLM 0.30 raises ValueErrors without a code, so recognise the field by words of the message.
        if re.search(r"(?i)fp8 kv[- ]cache|kv[-_]cache[-_]dtype", text):
            return f"rollout.kv_cache_dtype = {self._dtype}: choose auto"
        return None
