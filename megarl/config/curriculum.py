"""Recipe section `data.curriculum`: draw problems by their solve rates."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.annotations import OnlyIf
from megarl.config.conditions import CURRICULUM
from megarl.config.section import Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class CurriculumConfig(Section):
    """Choice of problems by their solve rates."""

    band: tuple[Share, Share] | None = None
    """Solve rates, [lowest, highest], of the problems to train on. Untried problems are always drawn. Problems outside
    the band are mostly skipped. Default: every problem is drawn once per epoch. Metrics: curriculum/."""
    # Above 0, because a skipped problem could never return to the band as the policy changes.
    outside: Annotated[float, Field(gt=0.0, le=1.0), OnlyIf(CURRICULUM)] = 0.1
    """Probability of drawing a problem outside the band when its turn comes, once per epoch."""
    memory: Annotated[float, Field(ge=0.0, lt=1.0), OnlyIf(CURRICULUM)] = 0.5
    """Weight of a problem's earlier solve rate against its newest group. 0: only the newest group counts."""
    by: Annotated[str | None, OnlyIf(CURRICULUM)] = None
    """Record field (a difficulty level, say) grouping problems: equal values share one solve rate. Default: one solve
    rate per problem."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.band is not None and self.band[0] > self.band[1]:
            raise PydanticCustomError("curriculum", "band: the lowest solve rate is above the highest; swap them")
        return self
