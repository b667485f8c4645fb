"""Recipe section `reward`: reward functions, reward model, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, NonNegativeFloat, PositiveFloat, PositiveInt, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.annotations import Foreign, OnlyIf
from megarl.config.conditions import REWARD_MODEL, RL
from megarl.config.section import Section


class RewardFunctionConfig(Section):
    """One reward function: name, weight, arguments."""

    name: str
    """Reward function: a name in `megarl.rewards`, `package.module:function` or `path/to/file.py:function`. The names
    of its parameters select the values passed to it: text, gold answer and others (`megarl.rewards.calling`)."""
    weight: float = 1.0
    """Factor of its score in the sum. 0: only measured. Metric: reward/NAME/mean."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Further keyword arguments: plain values, because they are sent to another process. For judge and remote see the
    fields of `megarl.config.http_rewards`."""
    judges_answer: bool | None = None
    """true: a Reward's answer_correct, or a score of at least reward.correct_score, means a right answer. false: no
    verdict. Default: built-in judges judge; so does an only function while it returns 0 or 1. Without a verdict no
    accuracy, pass_at_K or majority_at_K is logged (`megarl.config.judges`)."""
    # The error names the first line lacking a field, before any GPU time is spent.
    needs: tuple[str, ...] = ()
    """Record fields read by the function; dots reach into objects. A start fails at the first line without one."""

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
        """Serialise as the bare name if nothing else is given."""
        return self.name if self == RewardFunctionConfig(name=self.name) else dump(self)


class RewardConfig(Section):
    # With [] the records need no gold answer.
    """Reward functions and reward model."""

    functions: Annotated[tuple[RewardFunctionConfig, ...],
        Foreign("reward_type rm_type custom_rm_path remote_rm_url custom_reward_function",
            "custom_reward_function.name reward_manager reward_functions", note="names, or package.module:function",
            example="[think_answer_tags]", short="rt", ColossalRL="response_format_tags"),
        Foreign(note="parameters by megarl's names", example="[my/rewards.py:score]",
            verl="custom_reward_function.path"),
        Foreign(example="[boxed]", TRL="reward_funcs"),
        Foreign("reward_weights reward.weights reward.weight",
            note="[{name: NAME, weight: 2}], and the weights of functions and model",
            also="reward.function_weight reward.model_weight")] = (RewardFunctionConfig(name="boxed"),)  # fmt: skip
    """Reward functions with added weighted scores. Names of `megarl.rewards` (default: boxed), reasoning_gym.TASK,
    judge, remote, `package.module:function`, `path/to/file.py:function` (from the current folder), or {name: ...,
    weight: ..., kwargs: {...}}. []: nothing is measured (distillation without data.validation)."""
    function_weight: Annotated[NonNegativeFloat, OnlyIf(*REWARD_MODEL)] = 1.0
    """Weight of the functions' scores next to the reward model's. 0: they only measure accuracy (judges_answer)."""
    model: Annotated[str | None, OnlyIf(RL),
        Foreign(note="left out, the default", ColossalChat="--no_neural_reward_model"),
        Foreign("reward_pretrain reward_model_path reward_model.model.path reward_model_name_or_path",
            "rm_checkpoint_path", remark="a Hugging Face sequence classifier", example="models/rm",
            ColossalChat="--rm_pretrain")] = None  # fmt: skip
    """Folder of a reward model: sequence classification with one label and the policy's vocabulary. Its score of prompt
    and completion is added."""
    model_weight: Annotated[PositiveFloat, OnlyIf(*REWARD_MODEL)] = 1.0
    """Weight of the reward model's score."""
    model_clip: Annotated[PositiveFloat | None, OnlyIf(*REWARD_MODEL), Foreign("reward_clip_range")] = None
    """Clip the reward model's scores to [-x, x] (ColossalChat: 5). Default: no clipping."""
    num_workers: PositiveInt = 2
    """Number of processes scoring completions while others are still sampled."""
    timeout_seconds: PositiveFloat = 5.0
    """CPU seconds per completion for the functions and their child processes. Beyond it the completion scores zero and
    the process is replaced."""
    wall_timeout_seconds: PositiveFloat | None = None
    """Wall-clock seconds per completion, for functions waiting or hanging. Default: ten times timeout_seconds, at least
    30."""
    max_failed_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """Limit of the fraction of failed or timed-out completions in a step or an evaluation. Above it the run ends.
    Metrics: reward/errors, reward/timeouts, reward/parse_errors."""
    on_failure: Literal["zero", "leave_out"] = "zero"
    """Treatment of a completion without a score. zero (default): score zero. leave_out: no reward; its group ignores it
    and it is not trained (rl). It is counted as failed in both cases."""
    correct_score: float = 1.0
    """Score of a right answer (ColossalRL: 10)."""
    source_field: str | None = "data_source"
    """Record field naming the data source; dots reach into objects (default: verl's data_source). Metrics per source:
    reward/source/NAME/. null: none."""
