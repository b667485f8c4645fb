"""Settings of rewards from a server: the keyword arguments of `judge` and `remote` in reward.functions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section


class ServedConfig(Section):
    """Settings shared by all servers."""

    url: str
    """Address of the server, for example http://127.0.0.1:8000/v1. https uses the proxies named in the environment."""
    max_in_flight: PositiveInt = 64
    """Limit of simultaneous calls. Further completions wait, outside any time limit."""
    timeout_seconds: PositiveFloat = 60.0
    """Timeout of one call in seconds."""
    max_tries: PositiveInt = 3
    """Limit of calls to the server per completion, the first included. A call is retried after a timeout, an HTTP error
    (408, 425, 429, 5xx) or an answer without a readable score."""
    pause_seconds: NonNegativeFloat = 0.5
    """Pause in seconds before the second call, doubled before each further one. At least the server's Retry-After, up
    to a minute."""
    parse_error_score: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Score of a completion if the last answer has no readable score. Default: the completion has no score
    (reward.on_failure). Metric: reward/NAME/substituted."""
    correct_from: float | None = None
    """Lowest score of a right answer (val/SET/accuracy). Default: a judge's verdict CORRECT is right. Other choices, a
    scale and `remote` are verdicts only with judges_answer: true."""
    api_key_env: str | None = None
    """Name of the environment variable with the server's key, sent as a bearer token."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers of each request. No secrets: the run's folder stores the recipe."""

    @property
    def right_from(self) -> float | None:
        """Return the lowest score of a right answer. None: the score is not a verdict."""
        return self.correct_from


class JudgeConfig(ServedConfig):
    """A chat model judging completions."""

    model: str
    """Name of the model at the server."""
    prompt: str | None = None
    """File of the prompt, with placeholders {{question}}, {{completion}}, {{answer}} and {{record.FIELD}}. Default: ask
    whether the completion agrees with the gold answer."""
    system: str | None = None
    """System message of the judge. Default: none."""
    choices: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(
        default_factory=lambda: {"CORRECT": 1.0, "INCORRECT": 0.0}
    )
    """Verdicts with their scores. Upper and lower case are equal."""
    scale: tuple[float, float] | None = None
    """Lowest and highest number, for a judge answering with a number instead of a verdict. They score 0 and 1. Numbers
    outside are unreadable."""
    pattern: str | None = None
    """Regular expression. Its first group (or whole match) is the verdict, and the last match counts. A search of more
    than a second finds none. Default: the answer's last line without a label (Verdict: ...) and punctuation."""
    thoughts: Literal["hide", "show"] = "hide"
    """Whether the judge sees the completion up to its last </think>. hide (default): no, and it sees nothing of a
    completion cut inside its thoughts."""
    max_shown_characters: PositiveInt = 100_000
    """Limit of characters shown to the judge: the end of a longer completion."""
    temperature: NonNegativeFloat | None = 0.0
    """Sampling temperature of the judge. null: not in the request."""
    max_tokens: PositiveInt | None = 1024
    """Limit of tokens of the judge's answer. null: not in the request."""
    request: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the request, for example {seed: 1, response_format: {type: json_object}}."""
    dollars_per_million: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    """Price in dollars of a million tokens of prompt and of answer. Metric: reward/judge/dollars."""

    @property
    def right_from(self) -> float | None:
        """Return the lowest score of a right answer. Unlike other servers, the default choices are verdicts."""
        # Own choices or a scale may mean anything, so 1.0 need not be a right answer.
        has_own_scores = self.scale is not None or "choices" in self.model_fields_set
        return 1.0 if self.correct_from is None and not has_own_scores else self.correct_from

    @model_validator(mode="after")
    def _has_verdicts(self) -> Self:
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
    """A reward model behind a server."""

    protocol: Literal["slime", "openrlhf", "vllm"] = "slime"
    """Protocol of the server. slime (default): {prompt, response, label} returns a number, or an object with `score` or
    `reward`. openrlhf: {query, prompts, labels}, lists of one, returns {rewards: [number]}. vllm: a reward model at
    /pooling."""
    model: str | None = None
    """Name of the model at the server (protocol vllm)."""
    clip: PositiveFloat | None = None
    """Clip scores to [-x, x]. Default: no clipping."""

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if (self.protocol == "vllm") != (self.model is not None):
            raise PydanticCustomError("model", "model names the reward model of protocol vllm; give both or neither")
        return self
