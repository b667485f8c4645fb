"""Recipe section `reward`: reward functions, reward model, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from megarl.config.annotations import OnlyIf
from megarl.config.conditions import REWARD_MODEL, RL
from megarl.config.section import Section


class RewardFunctionConfig(Section):
    """One entry of reward.functions: name, weight, arguments."""

    name: str
    """Reward function: a built-in name (megarl/rewards), `package.module:function` or `path/to/file.py:function`. Its
    parameters' names select the values passed to it, for example `completion_text` and `answer`; all names:
    megarl/rewards/README.md."""
    weight: float = 1.0
    """Weight of this function's score in the sum of scores. 0: the score is only logged. Metric: reward/NAME/mean."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Further keyword arguments of the reward function: plain values (numbers, texts, lists, mappings), because another
    process gets them. For the rewards judge and remote: fields of megarl/config/sections/http_rewards.py."""
    judges_answer: bool | None = None
    """Whether the function decides that an answer is right, by Reward.answer_correct or a score of at least
    reward.correct_score. Default: true for built-in judges, and for a single function as long as it returns only 0 or
    1. Without a deciding function, accuracy, pass_at_K and majority_at_K are not logged."""
    # Checked at the start, so that a missing field costs no GPU time.
    needs: tuple[str, ...] = ()
    """Record fields read by the reward function. A dot selects a field of an inner object. If a record lacks one, the
    run does not start; the error names its line."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, Mapping | cls):
            raise PydanticCustomError("reward_function", "must be a name or {name: ..., weight: ..., kwargs: {...}}")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    @model_serializer(mode="wrap")
    def _short(self, dump: Callable[[Self], dict[str, Any]]) -> str | dict[str, Any]:
        return self.name if self == RewardFunctionConfig(name=self.name) else dump(self)


class RewardConfig(Section):
    """Reward functions and reward model."""

    # With [] the records need no gold answer.
    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(name="boxed"),)
    """Reward functions; their weighted scores are added. Built-in names (default: boxed), reasoning_gym.TASK, judge,
    remote, `package.module:function`, `path/to/file.py:function` (from the current folder), or {name: ..., weight: ...,
    kwargs: {...}}. []: no reward is computed (distillation without data.validation)."""
    function_weight: Annotated[NonNegativeFloat, OnlyIf(*REWARD_MODEL)] = 1.0
    """Weight of the reward functions' summed score next to a reward model (reward.model). 0: the functions only measure
    accuracy."""
    model: Annotated[str | None, OnlyIf(RL)] = None
    """Folder of a reward model: a Hugging Face sequence classifier with one label and the policy's vocabulary. Its
    score for prompt and completion is added to the reward. Default: none."""
    model_weight: Annotated[PositiveFloat, OnlyIf(*REWARD_MODEL)] = 1.0
    """Weight of the reward model's score in the reward."""
    model_clip: Annotated[PositiveFloat | None, OnlyIf(*REWARD_MODEL)] = None
    """Clip the reward model's scores to [-x, x] (ColossalChat: 5). Default: no clipping."""
    num_workers: PositiveInt = 2
    """Number of reward processes. They score completions while others are still being sampled."""
    timeout_seconds: PositiveFloat = 5.0
    """Maximum CPU seconds to score a completion, with all reward functions and their child processes. Above it, the
    completion scores zero, and the reward process is replaced."""
    wall_timeout_seconds: PositiveFloat | None = None
    """Maximum wall-clock seconds to score a completion, for reward functions that wait or hang. Default: ten times
    timeout_seconds, at least 30."""
    max_failed_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """Maximum share of completions without a score (because of an error or a timeout) in a step or an evaluation. A
    higher share ends the run. Metrics: reward/errors, reward/timeouts, reward/parse_errors."""
    on_failure: Literal["zero", "leave_out"] = "zero"
    """Reward of a completion after an error or timeout of a reward function. zero (default): 0. leave_out: none. The
    completion is then not trained, and does not count in its group's baseline (loop rl). Both values count it as
    failed (max_failed_fraction)."""
    correct_score: float = 1.0
    """Score of a right answer by the built-in reward functions. ColossalRL uses 10."""
    source_field: str | None = "data_source"
    """Record field with the name of the record's data source. A dot selects a field of an inner object. Default:
    data_source, as in verl. null: no metrics per source. Metrics: reward/source/NAME/."""
