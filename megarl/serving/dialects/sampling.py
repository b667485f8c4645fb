"""Sampling parameters of a request, by the field names of chat completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.serving.refusal import RequestError
from megarl.types import SamplingSettings

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    # Fields of vLLM and SGLang.
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "stop_token_ids": ([],),
    "stop_regex": ([], ""),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}
"""Refused fields, because they would change the sampled distribution or the number of answers. The listed values change
nothing and are accepted.
"""

_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 10**9),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 2.0),
}
"""Accepted ranges of sampling parameters. Accepted values are then replaced by the recipe's."""
_LENGTH_LIMITS = ("max_completion_tokens", "max_tokens")
"""Names of the length limit, the newer one first. max_tokens is deprecated, but many clients still send it."""
_CHAT_FIELDS = frozenset(
    ("model", "messages", "prompt", "tools", "stream", "stream_options", "seed", "stop", "logprobs", *_LENGTH_LIMITS,
     *_RANGES, *NEUTRAL)
)  # fmt: skip
"""Fields of chat completions and completions that are read, overridden or refused."""
_SILENT_FIELDS = frozenset(
    ("user", "metadata", "client_metadata", "store", "include", "service_tier", "safety_identifier",
     "prompt_cache_key", "prompt_cache_retention", "prediction", "priority", "request_id", "cache_salt", "betas")
)  # fmt: skip
"""Fields that ask for neither another prompt nor other samples."""
_DEFAULTS = {"parallel_tool_calls": True}
"""Values that ask for nothing, by field."""
CHANGES_SAMPLES = ", as it would change the samples; remove it"
"""Reason and remedy of an unsupported field."""


def list_changed_fields(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the fields with values that are not `neutral`. Neutral values change nothing."""
    return [name for name, values in neutral.items() if body.get(name) is not None and body[name] not in values]


def unsupported_field_error(name: str, value: Any, reason: str) -> RequestError:
    """Return the error for an unsupported field. `reason` includes the remedy."""
    return RequestError(f"{name} = {value!r:.80}: is not supported{reason}", param=name, code="unsupported_parameter")


def list_ignored_fields(body: Mapping[str, Any], read_fields: Collection[str] = _CHAT_FIELDS) -> list[str]:
    """Return the fields of a request that have no effect, but ask for one, such as `reasoning_effort`."""
    return [
        name
        for name, value in body.items()
        if value is not None and name not in read_fields and name not in _SILENT_FIELDS and value != _DEFAULTS.get(name)
    ]


def read_objects(value: Any, field_path: str, *, form: str = "a list of objects") -> list[Mapping[str, Any]]:
    """Check a list of objects in a request. Raises RequestError, naming the expected `form`, for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise RequestError(f"{field_path}: must be {form}", param=field_path)
    return value


def copy_sampling_fields(body: Mapping[str, Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields that chat completions read or refuse. All dialects treat them alike."""
    names = ("model", "stream", "seed", "stop", *_RANGES, *NEUTRAL)
    return {name: body[name] for name in names if name in body and name not in without}


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """Sampling parameters and form of the answer that a request asks for.

    `overridden` names the fields replaced by the recipe's values. `stops` are the request's stop strings.
    """

    sampling: SamplingSettings
    overridden: tuple[str, ...]
    stops: tuple[str, ...]
    is_streamed: bool
    has_usage_chunk: bool
    has_logprobs: bool

    @classmethod
    def read(cls, body: Mapping[str, Any], recipe: SamplingSettings) -> RequestParameters:
        """Read the parameters of a request.

        Raises RequestError for invalid values, and for fields that would change the sampled distribution.
        """
        # Refuse, do not ignore: training assumes that tokens come from the recipe's distribution.
        for name in list_changed_fields(body, NEUTRAL):
            raise unsupported_field_error(name, body[name], CHANGES_SAMPLES)
        sampling, overridden = _read_sampling(body, recipe)
        stream_options = body.get("stream_options")
        return cls(
            sampling,
            overridden,
            stops=tuple(stop for stop in sampling.stop if stop not in recipe.stop),
            is_streamed=bool(body.get("stream")),
            has_usage_chunk=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
            # 0 asks for the log-probs of the sampled tokens alone.
            has_logprobs=body.get("logprobs") is not None and body["logprobs"] is not False,
        )


def _read_sampling(body: Mapping[str, Any], recipe: SamplingSettings) -> tuple[SamplingSettings, tuple[str, ...]]:
    """Return a request's sampling parameters, and the names of fields that the recipe overrides.

    Clients may set only length limits and stop strings, within the recipe's limits.
    """
    sampling, overridden = recipe, []
    for name, (low, high) in _RANGES.items():
        if (value := body.get(name)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise RequestError(f"{name} = {value!r:.40}: give a number from {low:g} to {high:g}", param=name)
        if name == "top_k":
            # "No limit" is -1 in OpenAI-compatible servers and 0 in megarl.
            value = max(int(value), 0)
        if value != getattr(recipe, name):
            overridden.append(name)
    if body.get("seed") is not None:
        # Sessions derive seeds from the attempt, so that a run can be repeated.
        overridden.append("seed")
    limits = {name: body[name] for name in _LENGTH_LIMITS if body.get(name) is not None}
    for limit in limits.values():
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            # Requests of other dialects come here with their limit renamed.
            raise RequestError(f"max_tokens = {limit!r:.40}: give a number above 0", param="max_tokens")
    if limits:
        sampling = replace(sampling, max_new_tokens=min(next(iter(limits.values())), recipe.max_new_tokens))
    if stop := body.get("stop"):
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
            raise RequestError("stop: must be a text or a list of texts", param="stop")
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*recipe.stop, *stops))))
    return sampling, tuple(overridden)
