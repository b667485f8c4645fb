"""Recipe section `health`: thresholds of the rules warning of a run without learning."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.annotations import OnlyIf
from megarl.config.conditions import ON_POLICY, RL
from megarl.config.section import Section

Share = Annotated[float, Field(gt=0.0, le=1.0)]
Factor = Annotated[float, Field(gt=1.0)]
RuleName = Literal[
    "no_gradient", "constant_reward", "entropy_collapsed", "entropy_exploding", "grad_norm_rising", "mismatch_rising",
    "truncated", "no_end_of_sequence", "validation_falling", "learning_rate",
]  # fmt: skip


class HealthConfig(Section):
    """Thresholds of the health rules (`megarl.tracking.health`)."""

    off: tuple[RuleName, ...] = ()
    """Names of disabled rules of `megarl.tracking.health`."""
    window: PositiveInt = 3
    """Number of consecutive logged steps with a fault before its rule warns. Rules about a rise compare the median of
    the last n steps with that of the first n."""
    truncated: Annotated[Share, OnlyIf(ON_POLICY)] = 0.95
    """Share of attempts ending at the length limit (rollout/truncated) from which the rule truncated warns."""
    entropy_low: Annotated[NonNegativeFloat, OnlyIf(ON_POLICY)] = 1e-3
    """Entropy in nats per token (train/entropy) below which the rule entropy_collapsed warns."""
    entropy_rise: Factor = 5.0
    """Factor of an entropy rise (to at least entropy_high) from which entropy_exploding warns."""
    entropy_high: NonNegativeFloat = 1.0
    """Entropy in nats per token below which entropy_exploding does not warn."""
    grad_norm_rise: Factor = 10.0
    """Factor of a rise of train/grad_norm from which grad_norm_rising warns."""
    logprob_gap_rise: Annotated[Factor, OnlyIf(ON_POLICY)] = 10.0
    """Factor of a rise of logprob_gap/mean (to at least logprob_gap_high) from which mismatch_rising warns."""
    logprob_gap_high: Annotated[NonNegativeFloat, OnlyIf(ON_POLICY)] = 0.01
    """Mean distance of trainer and engine in nats per token below which mismatch_rising does not warn."""
    validation_drop: Annotated[Share, OnlyIf(RL)] = 0.05
    """Fall of val/SET/accuracy below its best, in two consecutive evaluations, from which validation_falling warns."""
    reward_rise: Annotated[PositiveFloat, OnlyIf(RL)] = 0.05
    """Rise of reward/mean since the best evaluation needed by validation_falling, in units of the reward."""
    learning_rate: tuple[PositiveFloat, PositiveFloat] | None = None
    """Usual range of optimizer.learning_rate, [lowest, highest]. Default (Adam): 1e-8 to 1 / the model's hidden size;
    ten times these with LoRA."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.learning_rate is not None and self.learning_rate[0] >= self.learning_rate[1]:
            raise PydanticCustomError("range", "learning_rate: the lowest is not below the highest; swap them")
        return self
