"""Settings of rewards computed by an HTTP server: the keyword arguments of `judge` and `remote` in reward.functions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section


class ServedConfig(Section):
    """Settings common to all reward servers."""

    url: str
    """Address of the server, for example http://127.0.0.1:8000/v1. For https, calls use the proxy in HTTPS_PROXY, if
    set."""
    max_in_flight: PositiveInt = 64
    """Maximum number of simultaneous calls to the server. Further completions wait; the wait counts for no timeout."""
    timeout_seconds: PositiveFloat = 60.0
    """Timeout of one call to the server in seconds."""
    max_tries: PositiveInt = 3
    """Maximum number of calls to the server for one completion, including the first. A call is repeated after a
    timeout, an HTTP error (408, 425, 429, 5xx) or an answer without a readable score."""
    pause_seconds: NonNegativeFloat = 0.5
    """Pause in seconds before the second call for a completion; it doubles before each further call. A Retry-After of
    the server, up to a minute, can lengthen it."""
    parse_error_score: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Score of a completion for which the server's last answer has no readable score. Default: none, and
    reward.on_failure applies. Metric: reward/NAME/substituted."""
    correct_from: float | None = None
    """An answer with at least this score counts as right (val/SET/accuracy). Default: the score of a judge's verdict
    CORRECT. A judge with other `choices` or a `scale`, and the reward `remote`, have no default. There, scores decide
    what is right only if judges_answer is true (reward.functions)."""
    api_key_env: str | None = None
    """Name of the environment variable with the server's API key, sent as a bearer token."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further HTTP headers of each request. No secrets: the run folder stores the recipe."""

    @property
    def right_from(self) -> float | None:
        """Lowest score of a right answer. None: scores are not verdicts."""
        return self.correct_from


class JudgeConfig(ServedConfig):
    """A chat model behind an OpenAI-compatible server that judges completions."""

    model: str
    """Name of the judge model at the server."""
    prompt: str | None = None
    """File with the judge's prompt. Placeholders: {{question}}, {{completion}}, {{answer}}, {{record.FIELD}}. Default:
    a prompt that asks whether the completion agrees with the gold answer."""
    system: str | None = None
    """System message of the judge. Default: none."""
    choices: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(
        default_factory=lambda: {"CORRECT": 1.0, "INCORRECT": 0.0}
    )
    """Verdicts of the judge, with their scores. Case is ignored. Default: {CORRECT: 1, INCORRECT: 0}."""
    scale: tuple[float, float] | None = None
    """Lowest and highest number, for a judge that answers with a number instead of a verdict. They score 0 and 1,
    numbers between them proportionally. A number outside is unreadable."""
    pattern: str | None = None
    """Regular expression for the verdict in the judge's answer: the last match, or its first group. A search longer
    than one second counts as no match. Default: the answer's last line, without punctuation or a label such as
    "Verdict:"."""
    thoughts: Literal["hide", "show"] = "hide"
    """Whether the judge sees the completion's thoughts, the text up to its last </think>: hide (default) or show. A
    completion that ends, or is cut, inside its thoughts has no answer: with the default choices, or with correct_from,
    it gets the lowest score without a call."""
    max_shown_characters: PositiveInt = 100_000
    """Maximum number of the completion's characters in the judge's prompt. If the completion is longer, the judge sees
    only its end."""
    temperature: NonNegativeFloat | None = 0.0
    """Sampling temperature of the judge. null: the server's default."""
    max_tokens: PositiveInt | None = 1024
    """Maximum number of tokens of the judge's answer. null: the server's default."""
    request: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the request to the judge, for example {seed: 1, response_format: {type: json_object}}."""
    dollars_per_million: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Price in dollars of a million prompt tokens and a million answer tokens of the judge. Default: unknown, without
    the metric reward/judge/dollars."""

    @property
    def right_from(self) -> float | None:
        """Lowest score of a right answer. CORRECT, a default choice, scores 1."""
        # Own choices or a scale may mean anything, so 1.0 need not be a right answer.
        has_own_scores = self.scale is not None or "choices" in self.model_fields_set
        return 1.0 if self.correct_from is None and not has_own_scores else self.correct_from

    @model_validator(mode="after")
    def _check_verdicts(self) -> Self:
        """Check that `choices` or `scale` says which verdicts the judge may give."""
        if self.scale is None and len(self.choices) < 2:
            raise PydanticCustomError("choices", "choices needs at least two verdicts, each with its score")
        if len({choice.casefold() for choice in self.choices}) < len(self.choices):
            raise PydanticCustomError("choices", "choices differ in upper and lower case only; name each once")
        if self.scale is not None and not self.scale[0] < self.scale[1]:
            raise PydanticCustomError("scale", "scale must be the lowest and the highest number, in this order")
        if self.scale is not None and "choices" in self.model_fields_set:
            raise PydanticCustomError("scale", "choices and scale exclude each other; give one")
        return self


class RemoteModelConfig(ServedConfig):
    """A reward model behind an HTTP server."""

    protocol: Literal["slime", "openrlhf", "vllm"] = "slime"
    """Protocol of the server. slime (default): sends {prompt, response, label}, gets a number or an object with `score`
    or `reward`. openrlhf: sends {query, prompts, labels}, lists of one, gets {rewards: [number]}. vllm: a reward model
    served at /pooling."""
    model: str | None = None
    """Name of the reward model at the server (protocol vllm only)."""
    clip: PositiveFloat | None = None
    """Clip the reward model's scores to [-x, x]. Default: no clipping."""

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if (self.protocol == "vllm") != (self.model is not None):
            raise PydanticCustomError("model", "model names the reward model of protocol vllm; give both or neither")
        return self
