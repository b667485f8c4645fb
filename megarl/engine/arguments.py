"""vLLM's arguments and configuration for a recipe, and its refusals told as faults of the recipe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError

from megarl.config import RolloutConfig
from megarl.config.decided_fields import ENGINE_FIELDS
from megarl.config.override import engine_overrides
from megarl.files.model_folder import read_object
from megarl.files.nearest import nearest
from megarl.platform import device, vllm_on_cpu
from megarl.types import ConfigError

vllm_on_cpu.prepare()

from vllm import EngineArgs  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402

from megarl.engine.executor import LeaderExecutor  # noqa: E402

VLLM_QUANTIZATION = {"fp8": "fp8_per_block", "fp8_per_channel": "fp8_per_channel"}
"""vLLM's names for `rollout.quantization`: it quantises what it loads, in blocks of 128 x 128 or by rows."""
ROUTERS = "*.mlp.gate"

REASON_LENGTH = 400
"""Characters of a refusal of vLLM that are told."""


@contextmanager
def refusals_named(config: RolloutConfig, max_model_len: int, *kinds: type[Exception]) -> Iterator[None]:
    """Tell vLLM's refusals, errors of these kinds, as faults of the recipe. Raises ConfigError naming the field."""
    try:
        yield
    except kinds as error:
        text = re.sub(r"\s+", " ", str(error))
        if re.search(r"KV cache|cache blocks", text):
            share = config.gpu_memory_utilization
            given = f"kv_cache_gib = {config.kv_cache_gib:g}" if share is None else f"gpu_memory_utilization = {share}"
            field = (
                f"rollout.{given}: too small for one sequence of {max_model_len} tokens (data.max_prompt_tokens + "
                "rollout.sampling.max_new_tokens); raise it"
            )
        elif config.async_scheduling and re.search(r"[Aa]sync(hronous)? scheduling", text):
            field = "rollout.async_scheduling = True: leave it out, then it is on where vLLM has it"
        else:
            given = [key for key in config.vllm if re.search(rf"\b{key.replace('_', '[_ ]')}\b", text)] or config.vllm
            field = ", ".join(f"rollout.vllm.{key} = {config.vllm[key]!r}" for key in given) or "rollout"
        reason = text
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            reason = f"{first['msg']}"
        raise ConfigError(f"{field}. vLLM refuses it: {reason[:REASON_LENGTH]}") from error


def engine_arguments(
    model_path: str,
    config: RolloutConfig,
    *,
    max_model_len: int,
    dtype: str,
    seed: int,
    override: Mapping[str, Any] | None = None,
) -> EngineArgs:
    """vLLM's arguments for this recipe; a field of `rollout.vllm` that vLLM does not know is a ConfigError."""
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for key in config.vllm:
        if key in ENGINE_FIELDS:
            raise ConfigError(f"rollout.vllm.{key}: set {ENGINE_FIELDS[key]} instead")
        if key not in known:
            hint = f"did you mean {near}?" if (near := nearest(key, known)) else "remove it"
            raise ConfigError(f"rollout.vllm.{key}: vLLM's EngineArgs has no such field; {hint}")
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "tensor_parallel_size": config.tp,
        "max_num_seqs": config.max_concurrent_requests,
        **_cache_size(config),
        **_quantization(config),
        "distributed_executor_backend": LeaderExecutor,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enable_sleep_mode": True,
        "moe_backend": "triton",  # the only one on CUDA whose experts lie as they were loaded
        "async_scheduling": config.async_scheduling,
        "disable_log_stats": True,
    }
    if torch.cuda.is_available() and device.cuda_toolkit() is None:
        # The pass is vLLM's default on Hopper from two ranks on; FlashInfer compiles its kernel when the engine starts.
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if override:
        arguments["hf_overrides"] = engine_overrides(read_object(Path(model_path) / "config.json"), override)
    return EngineArgs(**{**arguments, **vllm_on_cpu.engine_arguments(max_model_len), **config.vllm})


def _quantization(config: RolloutConfig) -> dict[str, Any]:
    """FP8 weights and KV cache, as far as the recipe asks for them."""
    found: dict[str, Any] = {} if config.kv_cache_dtype == "auto" else {"kv_cache_dtype": config.kv_cache_dtype}
    if config.quantization != "none":
        scheme = VLLM_QUANTIZATION[config.quantization]
        # Routers stay as they are: vLLM would quantise those of some families, and choose other experts.
        found |= {"quantization": scheme, "quantization_config": {"ignore": [ROUTERS]}}
    return found


def engine_config(arguments: EngineArgs, config: RolloutConfig) -> Any:
    """vLLM's whole configuration; what it chose itself decides who records kept sets and what that goes with.

    Raises ValueError where `config` asks for steps that are begun ahead and the platform has none.
    """
    found = arguments.create_engine_config(UsageContext.LLM_CLASS)
    is_ahead = found.scheduler_config.async_scheduling
    if config.async_scheduling and not is_ahead:
        raise ValueError("its platform switches async scheduling off")
    changes: dict[str, bool] = {}
    if config.sampling.is_truncated and found.use_v2_model_runner:
        # The newer model runner records by itself, the older one does not know of it.
        changes["return_sampling_mask"] = True
    elif config.sampling.is_truncated and is_ahead and config.async_scheduling is None:
        changes["async_scheduling"] = False  # see KeptSetRecorder.complete
    if not changes:
        return found
    return dataclasses.replace(arguments, **cast(Any, changes)).create_engine_config(UsageContext.LLM_CLASS)


def _cache_size(config: RolloutConfig) -> dict[str, Any]:
    """The KV cache's own size, or what vLLM finds left of its share of the GPU: the trainer is not built yet then."""
    if config.gpu_memory_utilization is not None:
        return {"gpu_memory_utilization": config.gpu_memory_utilization}
    return {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30)}
