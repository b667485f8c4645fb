"""The recipe's section `health`: thresholds of the rules that warn of a run that cannot learn."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section

Share = Annotated[float, Field(gt=0.0, le=1.0)]
Factor = Annotated[float, Field(gt=1.0)]
RuleName = Literal[
    "no_gradient", "constant_reward", "entropy_collapsed", "entropy_exploding", "grad_norm_rising", "mismatch_rising",
    "truncated", "no_end_of_sequence", "validation_falling", "learning_rate",
]  # fmt: skip


class HealthConfig(Section):
    off: tuple[RuleName, ...] = ()
    """Rules of `megarl.tracking.health` that do not warn."""
    window: PositiveInt = 3
    """Logged steps in a row that must show a fault before its rule warns. Rules about a rise compare the median of the
    last steps with that of as many first ones."""
    truncated: Share = 0.95
    """Share of attempts that end at the length limit (rollout/truncated) from which on the rule truncated warns."""
    entropy_low: NonNegativeFloat = 1e-3
    """Entropy in nats a token (train/entropy) below which the rule entropy_collapsed warns."""
    entropy_rise: Factor = 5.0
    """Factor by which the entropy must rise, to at least entropy_high, before entropy_exploding warns."""
    entropy_high: NonNegativeFloat = 1.0
    """Entropy in nats a token below which entropy_exploding does not warn."""
    grad_norm_rise: Factor = 10.0
    """Factor by which train/grad_norm must rise before grad_norm_rising warns."""
    logprob_gap_rise: Factor = 10.0
    """Factor by which logprob_gap/mean must rise, to at least logprob_gap_high, before mismatch_rising warns."""
    logprob_gap_high: NonNegativeFloat = 0.01
    """Mean distance of trainer and engine in nats a token below which mismatch_rising does not warn."""
    validation_drop: Share = 0.05
    """Fall of val/SET/accuracy below its best, at two evaluations in a row, from which on validation_falling warns."""
    reward_rise: PositiveFloat = 0.05
    """Rise of reward/mean since that best evaluation, in units of the reward, that validation_falling asks for."""
    learning_rate: tuple[PositiveFloat, PositiveFloat] | None = None
    """Lowest and highest usual optimizer.learning_rate. Default, for Adam: 1e-8 to 1 over the model's hidden size, ten
    times as much with LoRA."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.learning_rate is not None and self.learning_rate[0] >= self.learning_rate[1]:
            raise PydanticCustomError("range", "learning_rate: the lowest is not below the highest; swap them")
        return self
