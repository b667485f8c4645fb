"""Disables a fused all-reduce of vLLM on nodes without a CUDA toolkit (`rollout.vllm.compilation_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.types import ConfigError

_FIELD = "rollout.vllm.compilation_config"
_PASS = "fuse_allreduce_rms"
"""Compiler pass that vLLM 0.30 enables on Hopper for two or more ranks. At the start FlashInfer compiles its kernel,
and needs a CUDA toolkit.
"""


def without_fused_all_reduce(settings: Any) -> dict[str, Any]:
    """Return vLLM's compilation settings without the fused all-reduce, for a node without a CUDA toolkit.

    `settings` are the recipe's, or None. Raises ConfigError if they ask for the fused all-reduce, or are not tables.
    """
    settings = _as_table(_FIELD, settings)
    passes = _as_table(f"{_FIELD}.pass_config", settings.get("pass_config"))
    if (value := passes.get(_PASS)) not in (None, False):
        raise ConfigError(
            f"{_FIELD}.pass_config.{_PASS} = {value!r}: its kernel is compiled at the engine's start, and this node "
            "has no CUDA toolkit; install one and set CUDA_HOME, or remove the field"
        )
    return {**settings, "pass_config": {**passes, _PASS: False}}


def _as_table(field: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{field} = {value!r}: it must be a table of vLLM's settings, as in {{mode: 3}}; change it")
    return value
