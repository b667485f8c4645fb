"""vLLM's arguments and configuration for a recipe. Errors of vLLM become errors about recipe fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megarl.config import RolloutConfig
from megarl.config.libraries.engine_fields import engine_field_fault, refusals_by_field
from megarl.config.libraries.library_settings import reserved_settings
from megarl.config.override import engine_overrides
from megarl.engine.compilation_guard import without_fused_all_reduce
from megarl.engine.parts.engine_part import EnginePart
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape, completed_config, read_model_shape
from megarl.files.model_folder import read_object
from megarl.files.nearest import nearest
from megarl.platform import device, libraries
from megarl.types import ConfigError, Request

libraries.prepare_vllm()

from vllm import EngineArgs, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402

from megarl.engine.executor import LeaderExecutor  # noqa: E402
from megarl.engine.scheduler import RecordingAsyncScheduler, RecordingScheduler  # noqa: E402

REASON_LENGTH = 400
"""Maximum characters shown of a vLLM error."""


@contextmanager
def name_refused_field(
    config: RolloutConfig, max_model_len: int, parts: Sequence[EnginePart], *error_classes: type[Exception]
) -> Iterator[None]:
    """Turn vLLM's errors of these classes into a ConfigError that names the recipe field.

    `max_model_len` is in tokens.
    """
    try:
        yield
    except error_classes as error:
        text = re.sub(r"\s+", " ", str(error))
        field = _find_refused_field(text, config, max_model_len, parts)
        reason = text
        if isinstance(error, ValidationError):
            first_error = error.errors(include_url=False)[0]
            reason = f"{first_error['msg']}"
        raise ConfigError(f"{field}. vLLM refuses it: {reason[:REASON_LENGTH]}") from error


def _find_refused_field(text: str, config: RolloutConfig, max_model_len: int, parts: Sequence[EnginePart]) -> str:
    """Return the recipe field that a vLLM error with this text means, with its value, and a remedy if known."""
    # vLLM 0.30 raises ValueErrors without a code, so recognise the field by words of the message.
    for part in parts:
        if (field := part.find_refused_field(text)) is not None:
            return field
    if re.search(r"KV cache|cache blocks", text):
        memory_fraction = config.gpu_memory_utilization
        setting = (
            f"kv_cache_gib = {config.kv_cache_gib:g}"
            if memory_fraction is None
            else f"gpu_memory_utilization = {memory_fraction}"
        )
        return (
            f"rollout.{setting}: too small for one sequence of {max_model_len} tokens (data.max_prompt_tokens + "
            "rollout.sampling.max_new_tokens); raise it"
        )
    if config.async_scheduling and re.search(r"[Aa]sync(hronous)? scheduling", text):
        return "rollout.async_scheduling = True: leave it out; it is then on wherever vLLM supports it"
    # Name the keys in the message, or all of `rollout.vllm` if there are none.
    keys = [key for key in config.vllm if re.search(rf"\b{key.replace('_', '[_ ]')}\b", text)] or config.vllm
    return ", ".join(f"rollout.vllm.{key} = {config.vllm[key]!r}" for key in keys) or "rollout"


def engine_arguments(
    model_path: str,
    config: RolloutConfig,
    *,
    max_model_len: int,
    dtype: str,
    seed: int,
    override: Mapping[str, Any] | None = None,
    parts: Sequence[EnginePart] = (),
) -> EngineArgs:
    """Return vLLM's arguments for this recipe.

    `max_model_len` is in tokens. `override` replaces fields of the model's config.json. `parts` are the engine's
    optional features. Raises ConfigError for a field of `rollout.vllm` that vLLM does not know, or that megarl refuses.
    """
    _check_vllm_fields(config)
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "tensor_parallel_size": config.tp,
        "max_num_seqs": config.max_concurrent_requests,
        **_make_cache_size_argument(config),
        "distributed_executor_backend": LeaderExecutor,
        # A reshard brings the weights from the trainer.
        "load_format": "dummy",
        # Log-probs after temperature, top-p, top-k and min-p: of the distribution sampled from.
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enable_sleep_mode": True,
        # Only this one of vLLM 0.30's CUDA backends keeps the experts' weights in the layout of loading.
        "moe_backend": "triton",
        "async_scheduling": config.async_scheduling,
        "disable_log_stats": True,
    }
    for part in parts:
        arguments |= part.arguments()
    shape = read_model_shape(model_path, override)
    arguments |= _make_linear_attention_arguments(shape)
    fields = read_object(Path(model_path) / "config.json")
    changes = _collect_config_changes(fields, model_path, shape, override)
    # A function can remove a field too: reshards send full precision, whatever the folder's files have.
    if fields.get("quantization_config") is not None:
        arguments["hf_overrides"] = partial(_override_config, changes)
    elif changes:
        arguments["hf_overrides"] = changes
    arguments |= libraries.vllm_arguments(max_model_len) | config.vllm
    if torch.cuda.is_available() and device.cuda_toolkit() is None:
        arguments["compilation_config"] = without_fused_all_reduce(config.vllm.get("compilation_config"))
    return EngineArgs(**arguments)


def _check_vllm_fields(config: RolloutConfig) -> None:
    """Raise ConfigError for a field of `rollout.vllm` that vLLM does not know, or that megarl refuses."""
    field_names = {field.name for field in dataclasses.fields(EngineArgs)}
    for key in config.vllm:
        if key not in field_names and key not in refusals_by_field():
            hint = f"did you mean {similar_name}?" if (similar_name := nearest(key, field_names)) else "remove it"
            raise ConfigError(f"rollout.vllm.{key}: vLLM's EngineArgs has no such field; {hint}")
        # The check before a start refuses a field that another recipe field decides. An engine can take it. Keep values
        # out of the message: they may contain a token.
        if key not in reserved_settings("vllm") and (fault := engine_field_fault(key)) is not None:
            raise ConfigError(f"rollout.vllm.{key}: {fault}")


def _collect_config_changes(
    fields: Mapping[str, Any], model_path: str, shape: ModelShape, override: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of config.json that vLLM must read with another value, or that the file lacks.

    `fields` is the file's content, and `override` the recipe's changes of it.
    """
    changes = engine_overrides(fields, override, _rope_fields(shape)) if override else {}
    completed_fields = completed_config(fields, Path(model_path))
    changes |= {
        name: value for name, value in completed_fields.items() if fields.get(name) is None and value is not None
    }
    if architecture := FAMILIES[shape.family].engine_architecture:
        changes |= {"architectures": [architecture]}
    return changes


def _rope_fields(shape: ModelShape) -> dict[str, float]:
    rope = {"rope_theta": shape.rotary.theta}
    return rope if shape.rotary.fraction == 1 else {**rope, "partial_rotary_factor": shape.rotary.fraction}


def _override_config(changes: Mapping[str, Any], config: Any) -> Any:
    """Change fields of a model's config for vLLM. Remove its `quantization_config`: the trainer sends full
    precision.
    """
    config.update(dict(changes))
    del config.quantization_config
    return config


def _make_linear_attention_arguments(shape: ModelShape) -> dict[str, Any]:
    """Return the arguments for models with linear attention, which has a state per sequence; empty for other models."""
    if shape.linear_attention is None:
        return {}
    return {
        # vLLM 0.30 caches states at the ends of prefill chunks (mode `align`). Without chunks, as on a CPU, its config
        # check fails. On GPUs, the mode is not tested with reshards. `preflight.memory.resources` reports this.
        "enable_prefix_caching": False,
        # float32 as in the trainer. bfloat16 would round the states at each token.
        "mamba_ssm_cache_dtype": "float32",
    }


def engine_config(arguments: EngineArgs, config: RolloutConfig, parts: Sequence[EnginePart] = ()) -> Any:
    """Return vLLM's complete configuration, revised by the `parts`.

    Raises ValueError if `config.async_scheduling` is True but vLLM's platform does not support it.
    """
    vllm_config = arguments.create_engine_config(UsageContext.LLM_CLASS)
    if config.async_scheduling and not vllm_config.scheduler_config.async_scheduling:
        raise ValueError("vLLM's platform does not support async scheduling")
    changes: dict[str, Any] = {}
    for part in parts:
        changes |= part.revise_arguments(vllm_config)
    if changes:
        vllm_config = dataclasses.replace(arguments, **changes).create_engine_config(UsageContext.LLM_CLASS)
    is_ahead = vllm_config.scheduler_config.async_scheduling
    vllm_config.scheduler_config.scheduler_cls = RecordingAsyncScheduler if is_ahead else RecordingScheduler
    return vllm_config


def _make_cache_size_argument(config: RolloutConfig) -> dict[str, Any]:
    # With a fraction, vLLM measures the free memory at its start, before the trainer exists.
    if config.gpu_memory_utilization is not None:
        return {"gpu_memory_utilization": config.gpu_memory_utilization}
    return {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30)}


def sampling_params(request: Request) -> SamplingParams:
    """Return vLLM's sampling parameters of a request, with log-probs of each sampled token and of `num_top_tokens`
    others.
    """
    # With a seed per request, all ranks of a tensor-parallel group draw the same tokens.
    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        seed=request.seed,
        ignore_eos=sampling.ignore_eos,
        # 0: only the sampled token's log-prob. Flat: one array, not one dictionary per token.
        logprobs=sampling.num_top_tokens,
        flat_logprobs=True,
        # Text is needed only to find stop strings.
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Only this request uses the parameters: vLLM needs no copy.
        skip_clone=True,
    )
