"""Settings of rewards that a server gives: the keyword arguments of `judge` and `remote` in reward.functions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section


class ServedConfig(Section):
    url: str
    """Address of the server, such as http://127.0.0.1:8000/v1. https goes by the proxies that the environment names."""
    max_in_flight: PositiveInt = 64
    """Calls at the same time; further completions wait, which no time limit counts."""
    timeout_seconds: PositiveFloat = 60.0
    """Seconds of a call."""
    max_tries: PositiveInt = 3
    """Calls for a completion: one that is not answered in time, is answered with an error of the server (408, 425, 429,
    5xx) or without a score that can be read is repeated."""
    pause_seconds: NonNegativeFloat = 0.5
    """Pause before the second call, doubled before each further one; at least what the server asks for by Retry-After,
    up to a minute."""
    parse_error_score: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Score of a completion whose last answer has no score that can be read, counted in reward/NAME/substituted; left
    out, it could not be scored (reward.on_failure)."""
    correct_from: float | None = None
    """Score from which on the answer is right (val/SET/accuracy). Left out, a judge's verdict CORRECT is right, and
    other choices, a scale and `remote` judge only with judges_answer: true."""
    api_key_env: str | None = None
    """Name of the environment variable with the server's key, sent as a bearer token."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers of each request; no secrets, for the run's folder has the recipe."""

    @property
    def right_from(self) -> float | None:
        """Score from which on the answer is right; None: the score is not a verdict."""
        return self.correct_from


class JudgeConfig(ServedConfig):
    model: str
    """The model's name at the server."""
    prompt: str | None = None
    """File of the prompt, with {{question}}, {{completion}}, {{answer}} and {{record.FIELD}} where these go; left out,
    a prompt that asks whether the completion agrees with the gold answer."""
    system: str | None = None
    """System message."""
    choices: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(
        default_factory=lambda: {"CORRECT": 1.0, "INCORRECT": 0.0}
    )
    """Verdicts, and the score of each; upper and lower case are the same."""
    scale: tuple[float, float] | None = None
    """Lowest and highest number of a judge that gives one instead of a verdict; the score is 0 at the first, 1 at the
    second, and another number cannot be read."""
    pattern: str | None = None
    """Regular expression whose first group, or all of it, is the verdict; the last match counts, and where it takes
    longer than a second there is none. Left out, the verdict is all of the answer's last line, but for a label
    (Verdict: ...) and punctuation."""
    thoughts: Literal["hide", "show"] = "hide"
    """Whether the judge sees what the completion has up to its last </think>; hidden, of one that is cut short in its
    thoughts it sees nothing."""
    max_shown_characters: PositiveInt = 100_000
    """Of a longer completion the judge sees this much of its end."""
    temperature: NonNegativeFloat | None = 0.0
    """Sampling temperature of the judge; null: the request has none."""
    max_tokens: PositiveInt | None = 1024
    """Tokens of the judge's answer; null: the request has no such bound."""
    request: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the request, such as {seed: 1, response_format: {type: json_object}}."""
    dollars_per_million: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    """Price of a million tokens of prompt and of answer, for reward/judge/dollars."""

    @property
    def right_from(self) -> float | None:
        """As for any server; the choices CORRECT and INCORRECT are verdicts too."""
        has_own_scores = self.scale is not None or "choices" in self.model_fields_set
        return 1.0 if self.correct_from is None and not has_own_scores else self.correct_from

    @model_validator(mode="after")
    def _has_verdicts(self) -> Self:
        if self.scale is None and len(self.choices) < 2:
            raise PydanticCustomError("choices", "choices must be two verdicts at least, each with its score")
        if len({choice.casefold() for choice in self.choices}) < len(self.choices):
            raise PydanticCustomError("choices", "choices differ in upper and lower case only; name each once")
        if self.scale is not None and not self.scale[0] < self.scale[1]:
            raise PydanticCustomError("scale", "scale must be the lowest and the highest number, in this order")
        if self.scale is not None and "choices" in self.model_fields_set:
            raise PydanticCustomError("scale", "choices and scale exclude each other; give one")
        return self


class RemoteModelConfig(ServedConfig):
    protocol: Literal["slime", "openrlhf", "vllm"] = "slime"
    """Protocol of the server. slime: {prompt, response, label} for a number, or for an object with a `score`
    or `reward`; openrlhf: {query, prompts, labels}, lists of one, for {rewards: [number]}; vllm: a reward model at
    its /pooling."""
    model: str | None = None
    """The model's name at the server (vllm)."""
    clip: PositiveFloat | None = None
    """Clip scores to between minus and plus this."""

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if (self.protocol == "vllm") != (self.model is not None):
            raise PydanticCustomError("model", "model names the reward model of protocol vllm; give both or neither")
        return self
