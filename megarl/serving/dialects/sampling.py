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
    "chat_template_kwargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "structured_outputs": (),
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
CHANGES_SAMPLES = ", as it would change the samples; remove it"
"""Reason and remedy of an unsupported field."""


def changed_fields(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the fields with values that are not `neutral`. Neutral values change nothing."""
    return [name for name, values in neutral.items() if body.get(name) is not None and body[name] not in values]


def unsupported_field(name: str, value: Any, reason: str) -> RequestError:
    """Return the error for an unsupported field. `reason` includes the remedy."""
    return RequestError(f"{name} = {value!r:.80}: is not supported{reason}", param=name, code="unsupported_parameter")


def read_objects(value: Any, where: str, *, form: str = "a list of objects") -> list[Mapping[str, Any]]:
    """Check a list of objects in a request. Raises RequestError, naming the expected `form`, for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise RequestError(f"{where}: must be {form}", param=where)
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
        for name in changed_fields(body, NEUTRAL):
            raise unsupported_field(name, body[name], CHANGES_SAMPLES)
        sampling, overridden = _read_sampling(body, recipe)
        stream_options = body.get("stream_options")
        return cls(
            sampling,
            overridden,
            stops=tuple(stop for stop in sampling.stop if stop not in recipe.stop),
            is_streamed=bool(body.get("stream")),
            has_usage_chunk=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
            has_logprobs=body.get("logprobs") not in (None, False),
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
    # max_tokens is OpenAI's deprecated name; many clients still send it.
    max_new_tokens = body.get("max_completion_tokens")
    if max_new_tokens is None:
        max_new_tokens = body.get("max_tokens")
    if max_new_tokens is not None:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise RequestError(f"max_tokens = {max_new_tokens!r:.40}: give a number above 0", param="max_tokens")
        sampling = replace(sampling, max_new_tokens=min(max_new_tokens, recipe.max_new_tokens))
    if stop := body.get("stop"):
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
            raise RequestError("stop: must be a text or a list of texts", param="stop")
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*recipe.stop, *stops))))
    return sampling, tuple(overridden)
