"""JSON bodies of the SDK's requests.

Newer versions of the SDK send more fields. Unknown fields that could change training or sampling are refused
(`Settings`), others are ignored.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    Strict,
    ValidationError,
    model_validator,
)

from megarl.service.refusals import UserError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Pattern of a checkpoint's name: one safe part of a path."""
# All samples of a request enter the pool's queue at once, ahead of later clients.
_MAX_SAMPLES = 1024
"""Maximum number of samples of one request."""
# This is vLLM's limit, max_logprobs. For prompts the trainer computes them.
_MAX_TOP_TOKENS = 20
"""Maximum number of most likely tokens at each position of a sample."""
_MAX_PROMPT_TOP_TOKENS = 128
"""Maximum number of most likely tokens at each position of a prompt."""
_MAX_METADATA = 16_384
"""Maximum characters of a client's metadata. They stay in memory and in every listing."""
# vLLM compares the text's end with each stop after every token.
_MAX_STOPS = 64
"""Maximum number of stop strings or stop tokens."""
_TTL_SECONDS = (3600, 10 * 366 * 86400)
"""Shortest and longest lifetime of a checkpoint, as in the SDK: an hour and ten years."""


# SDK 0.38 writes model and number before the client's metadata. It escapes quotes in texts, so no text matches.
_MODEL_ID = re.compile(rb'"model_id": ?"([a-z0-9:]{1,100})"')
_SEQ_ID = re.compile(rb'"seq_id": ?([0-9]{1,18})[,}]')

# Python's integers have no limit, and a model's number is part of its files' names.
Number = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
"""A number counted by the client."""

# Strict: pydantic would read true as 1, "no" as false and "5" as 5. A wrong type shows a client's mistake.
Whole = Annotated[int, Strict()]
Real = Annotated[FiniteFloat, Strict()]
Truth = Annotated[bool, Strict()]


class Body(BaseModel):
    """A request's body. The SDK has names that begin with `model_`."""

    model_config = {"protected_namespaces": (), "extra": "ignore"}


class StrictBody(Body):
    """A body of which all fields matter to the results. Unknown fields are refused, unless they are null."""

    _known_type: ClassVar[str | None] = None
    """The `type` of the body; None: any. Optimizers of other types have other settings."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        """Refuse fields unknown to this class: ignoring them would train or sample differently."""
        # `check_optimizer` refuses another optimizer, so its settings need no error of their own.
        if isinstance(values, dict) and cls._known_type in (None, values.get("type", cls._known_type)):
            for name, value in values.items():
                # Requests of the SDK write their name as `type`. Newer settings may too.
                if name not in cls.model_fields and name != "type" and value is not None:
                    raise ValueError(
                        f"{name:.50} = {value!r:.50} is not supported; leave it out, or use one of "
                        f"{', '.join(cls.model_fields)}"
                    )
        return values


def _format_metadata(values: dict[str, Any]) -> dict[str, str]:
    """Return a client's metadata as texts. The SDK sends any values, but reads texts."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    if sum(len(name) + len(text) for name, text in texts.items()) > _MAX_METADATA:
        raise ValueError(f"has more than {_MAX_METADATA} characters; cut it")
    return texts


Metadata = Annotated[dict[str, Any], AfterValidator(_format_metadata)]
"""A client's notes on a session, a run or a checkpoint. Only listings show them."""


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: Metadata | None = None
    project_id: str | None = None
    display_name: Annotated[str, Field(max_length=200)] | None = None


class Page(Body):
    """A page of a listing."""

    # Not strict: they come from the URL's query, as texts.
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    offset: Annotated[int, Field(ge=0)] = 0


class Lifetime(Body):
    """Seconds until a checkpoint expires; None: never. The field is required."""

    ttl_seconds: Annotated[Whole, Field(ge=_TTL_SECONDS[0], le=_TTL_SECONDS[1])] | None


class Numbered(Body):
    """A request for a model, with the client's sequence number."""

    model_id: str
    seq_id: Whole


class LoraSettings(StrictBody):
    rank: Annotated[Whole, Field(gt=0)]
    seed: Annotated[Whole, Field(ge=0)] | None = None
    # True is the SDK's default. It has no effect here, but refusing it would refuse most programs.
    train_unembed: Truth = True
    train_mlp: Truth = True
    train_attn: Truth = True


class OptimizerKind(StrictBody):
    _known_type = "adamw"
    type: str = "adamw"


class CreateModel(StrictBody):
    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraSettings | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class LoadWeights(StrictBody):
    """A load either creates a model (`session_id`), or is the first numbered request of one (`model_id`)."""

    path: str
    optimizer: Truth
    session_id: str | None = None
    model_seq_id: Number | None = None
    model_id: str | None = None
    seq_id: Whole | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerKind | None = None
    weights_access_token: str | None = None


class AdamSettings(StrictBody):
    """Settings of one step of AdamW, with the SDK's defaults. `grad_clip_norm` 0: no clipping."""

    learning_rate: Annotated[Real, Field(ge=0)] = 1e-4
    beta1: Annotated[Real, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Real, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Real, Field(gt=0)] = 1e-12
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[Real, Field(ge=0)] = 0.0


class OptimStep(Numbered, StrictBody):
    adam_params: AdamSettings | None = None
    optimizer_params: OptimizerKind | None = None


class SaveWeights(Numbered):
    path: Annotated[str, Field(pattern=NAME)]
    ttl_seconds: Annotated[Whole, Field(ge=_TTL_SECONDS[0], le=_TTL_SECONDS[1])] | None = None
    overwrite: Truth = False
    user_metadata: Metadata | None = None


class SaveForSampler(Numbered):
    path: Annotated[str, Field(pattern=NAME)] | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: Annotated[Whole, Field(ge=_TTL_SECONDS[0], le=_TTL_SECONDS[1])] | None = None
    user_metadata: Metadata | None = None


class CreateSampler(StrictBody):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(StrictBody):
    _known_type = "encoded_text"
    type: str = "encoded_text"
    tokens: list[Annotated[Whole, Field(ge=0)]] = []


class Prompt(StrictBody):
    chunks: list[PromptChunk]


def _check_temperature(value: float) -> float:
    if 0 < value < 0.01:
        raise ValueError("is between 0 and 0.01, where log-probs overflow; give 0 (greedy), or at least 0.01")
    return value


def _check_stops(stop: Any) -> Any:
    """Refuse invalid stops. Pydantic would report a fault inside a list as "the list should be a text"."""
    if isinstance(stop, list) and len(stop) > _MAX_STOPS:
        raise ValueError(f"has {len(stop)} stops; give at most {_MAX_STOPS}")
    # `type`, not `isinstance`: True is an int.
    if isinstance(stop, list):
        is_valid = all(type(value) in (str, int) for value in stop)
    else:
        is_valid = stop is None or isinstance(stop, str)
    if not is_valid:
        raise ValueError("is neither a text nor a list of texts and token ids; give one of them, or [] for no stop")
    return stop


class SampleSettings(StrictBody):
    max_tokens: Annotated[Whole, Field(gt=0)] | None = None
    seed: Whole | None = None
    stop: Annotated[str | list[str | int] | None, BeforeValidator(_check_stops)] = None
    # vLLM 0.30 refuses higher temperatures, and silently raises those between 0 and 0.01.
    temperature: Annotated[Real, Field(ge=0, le=2), AfterValidator(_check_temperature)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1)] = -1
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0


class SampleAddress(Body):
    """A sampling request's session, its number in the session, and its number of samples."""

    sampling_session_id: str
    seq_id: Number
    num_samples: Annotated[Whole, Field(ge=1, le=_MAX_SAMPLES)] = 1


class SampleRequest(SampleAddress, StrictBody):
    base_model: str | None = None
    model_path: str | None = None
    prompt: Prompt
    sampling_params: SampleSettings
    prompt_logprobs: Truth | None = None
    topk_prompt_logprobs: Annotated[Whole, Field(ge=0, le=_MAX_PROMPT_TOP_TOKENS)] = 0
    topk_sample_logprobs: Annotated[Whole, Field(ge=0, le=_MAX_TOP_TOKENS)] = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: Whole = 0
    prompt_logprobs_last_n: Annotated[Whole, Field(gt=0)] | None = None
    record_stability_info: Truth | None = None


class RetrieveFuture(Body):
    request_id: str


class SessionAddress(Body):
    session_id: str


class ModelAddress(Body):
    model_id: str


class PathAddress(Body):
    tinker_path: str


def read_fields(body_class: type[Any], values: dict[str, Any]) -> Any:
    """Return a body of `body_class`. Raises UserError with the first invalid field."""
    try:
        return body_class.model_validate(values)
    except ValidationError as error:
        first_error = error.errors()[0]
        field_path = ".".join(map(str, first_error["loc"]))
        value = first_error.get("input")
        is_short = isinstance(value, str | int | float | bool) and not (isinstance(value, float) and math.isnan(value))
        value_text = f" = {value!r:.80}" if is_short and first_error["type"] != "missing" else ""
        # Pydantic's prefix of texts raised by this module.
        fault = first_error["msg"].removeprefix("Value error, ")
        # A fault of the whole body has no field.
        field_text = f"{field_path}{value_text}"
        raise UserError(f"{field_text}: {fault}" if field_text else fault) from error


def find_model_and_number(head: bytes) -> tuple[str, int] | None:
    """Return model id and sequence number (`seq_id`) from the first bytes of a JSON body, or None."""
    model_id, seq_id = _MODEL_ID.search(head), _SEQ_ID.search(head)
    return None if model_id is None or seq_id is None else (model_id[1].decode(), int(seq_id[1]))


def count_sampling_tokens(values: dict[str, Any], num_samples: int, context_tokens: int) -> int:
    """Return the maximum tokens of a request's prompt and samples. Its fields are not checked yet."""
    try:
        body = SampleRequest.model_validate(values)
    except ValidationError:
        # A request with such faults fails at once: it needs no room.
        return 1
    num_prompt_tokens = sum(len(chunk.tokens) for chunk in body.prompt.chunks)
    max_completion_tokens = max(1, context_tokens - num_prompt_tokens)
    return num_prompt_tokens + num_samples * min(
        max_completion_tokens, body.sampling_params.max_tokens or max_completion_tokens
    )
