"""The recipe's section `reward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, NonNegativeFloat, PositiveFloat, PositiveInt, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section


class RewardFunctionConfig(Section):
    name: str
    """A name of `megarl.rewards`, `package.module:function` or `path/to/file.py:function`. Its parameters are named
    after the values of a sample that it wants (`megarl.rewards.calling`)."""
    weight: float = 1.0
    """Factor of its score in the sum; 0: it is only measured (reward/NAME/mean)."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments that it is called with besides; plain values, which go to another process. Those of judge and
    remote are the fields of `megarl.config.served`."""
    judges_answer: bool | None = None
    """true: a Reward's answer_correct, or a score of at least reward.correct_score, is a right answer. false: no
    verdict. Left out: built-in judges judge, and the only function does while it returns 0 or 1. Without a judge no
    accuracy, pass_at_K or majority_at_K is logged (`megarl.config.judges`)."""
    needs: tuple[str, ...] = ()
    """Fields of the records that it reads, dots going into objects; a start names the first line that lacks one."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given}
        if not isinstance(given, Mapping | cls):
            raise PydanticCustomError("reward_function", "must be a name or {name: ..., weight: ..., kwargs: {...}}")
        return given

    @model_serializer(mode="wrap")
    def _short(self, dump: Callable[[Self], dict[str, Any]]) -> str | dict[str, Any]:
        """The bare name where that says all."""
        return self.name if self == RewardFunctionConfig(name=self.name) else dump(self)


class RewardConfig(Section):
    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(name="boxed"),)
    """Reward functions whose weighted scores are added: names of `megarl.rewards`, reasoning_gym.TASK, judge, remote,
    `package.module:function` or `path/to/file.py:function`; with a weight or arguments {name: ..., weight: ...,
    kwargs: {...}}. Relative paths begin at the current folder. A distillation without data.validation may have none,
    []: then nothing is measured, and records need no answer."""
    function_weight: NonNegativeFloat = 1.0
    """Weight of the functions' scores beside the reward model's; 0: they only measure accuracy (judges_answer)."""
    model: str | None = None
    """Folder of a reward model (sequence classification with one label, the policy's vocabulary) whose score of prompt
    and completion is added."""
    model_weight: PositiveFloat = 1.0
    """Weight of the reward model's score."""
    model_clip: PositiveFloat | None = None
    """Clip the reward model's scores to between minus and plus this (ColossalChat: 5)."""
    num_workers: PositiveInt = 2
    """Processes that score completions while others are still sampled."""
    timeout_seconds: PositiveFloat = 5.0
    """CPU seconds that the functions and what they start may take for one completion; beyond, it gets zero and the
    process is replaced."""
    wall_timeout_seconds: PositiveFloat | None = None
    """Seconds by the clock, for functions that wait or hang; left out, ten times timeout_seconds, at least 30."""
    max_failed_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """The run ends where a larger fraction of a step's or an evaluation's completions failed or timed out
    (reward/errors, reward/timeouts, reward/parse_errors)."""
    on_failure: Literal["zero", "leave_out"] = "zero"
    """Fate of a completion that could not be scored: the score zero, or no reward, so that its group is compared
    without it and it is not trained (rl). It is counted in either case."""
    correct_score: float = 1.0
    """Score of a right answer (ColossalRL: 10)."""
    source_field: str | None = "data_source"
    """Field of the records that names their data source, dots going into objects (verl: data_source); where records
    have it, reward/source/NAME/ are the metrics of each. null: none."""
