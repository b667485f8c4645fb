"""Recipe section `health`: thresholds of the rules that warn when a run is not learning."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.annotations import OnlyIf
from megarl.config.conditions import EVALUATED, LORA, ON_POLICY, RL, TOKEN_LOSS
from megarl.config.section import Section

Share = Annotated[float, Field(gt=0.0, le=1.0)]
Factor = Annotated[float, Field(gt=1.0)]
RuleName = Literal[
    "no_gradient", "constant_reward", "entropy_collapsed", "entropy_exploding", "grad_norm_rising", "mismatch_rising",
    "lost_in_merge", "truncated", "no_end_of_sequence", "validation_falling", "learning_rate",
]  # fmt: skip


class HealthConfig(Section):
    """Thresholds of the health rules (`megarl.tracking.health`)."""

    off: tuple[RuleName, ...] = ()
    """Health rules to disable, for example [entropy_collapsed]. All rules: megarl/tracking/health.py."""
    window: PositiveInt = 3
    """Number n of consecutive logged steps that must break a health rule before it warns. Rules about a rising metric
    compare the median of the last n steps with the median of the first n."""
    lost_in_merge: Annotated[Share, OnlyIf(*LORA, ON_POLICY)] = 0.3
    """The health rule `lost_in_merge` warns if the metric lora/lost_in_merge is above this value. The metric is the
    share of the adapters' update that is lost when the merged weights are rounded."""
    truncated: Annotated[Share, OnlyIf(ON_POLICY)] = 0.95
    """Share of attempts cut at the length limit (metric rollout/truncated) from which the health rule `truncated`
    warns."""
    entropy_low: Annotated[NonNegativeFloat, OnlyIf(ON_POLICY)] = 1e-3
    """Entropy in nats per token (metric train/entropy) below which the health rule `entropy_collapsed` warns."""
    entropy_rise: Annotated[Factor, OnlyIf(TOKEN_LOSS)] = 5.0
    """Factor by which the entropy must rise for the health rule `entropy_exploding` to warn. It must also reach
    entropy_high."""
    entropy_high: Annotated[NonNegativeFloat, OnlyIf(TOKEN_LOSS)] = 1.0
    """Entropy in nats per token below which the health rule `entropy_exploding` never warns."""
    grad_norm_rise: Factor = 10.0
    """Factor by which the metric train/grad_norm must rise for the health rule `grad_norm_rising` to warn."""
    logprob_gap_rise: Annotated[Factor, OnlyIf(ON_POLICY)] = 10.0
    """Factor by which the metric logprob_gap/mean must rise for the health rule `mismatch_rising` to warn. It must also
    reach logprob_gap_high."""
    logprob_gap_high: Annotated[NonNegativeFloat, OnlyIf(ON_POLICY)] = 0.01
    """Mean distance of trainer and engine log-probs, in nats per token, below which the health rule `mismatch_rising`
    never warns."""
    validation_drop: Annotated[Share, OnlyIf(RL, EVALUATED)] = 0.05
    """The health rule `validation_falling` warns if val/SET/accuracy is this far below its best value in two
    consecutive evaluations."""
    reward_rise: Annotated[PositiveFloat, OnlyIf(RL, EVALUATED)] = 0.05
    """Minimum rise of the metric reward/mean since the best evaluation, in units of the reward, for the health rule
    `validation_falling` to warn."""
    learning_rate: tuple[PositiveFloat, PositiveFloat] | None = None
    """Usual range of optimizer.learning_rate, [lowest, highest]; another rate gives a warning. Default for Adam: 1e-8
    to 1 / (the model's hidden size); with LoRA ten times as high."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.learning_rate is not None and self.learning_rate[0] >= self.learning_rate[1]:
            raise PydanticCustomError("range", "learning_rate: the lowest is not below the highest; swap them")
        return self
