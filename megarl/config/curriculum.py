"""Curricula: which problems are drawn more often, by how often they are solved."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class CurriculumConfig(Section):
    band: tuple[Share, Share] | None = None
    """Solve rates, [lowest, highest], of problems that are drawn whenever they come up, as those never tried are. A
    problem that is solved less or more often is passed over most times, and tried again now and then. Left out: every
    problem is drawn once an epoch. Metrics: curriculum/."""
    outside: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Probability with which a problem outside the band is drawn when it comes up, once an epoch."""
    memory: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Weight of a problem's earlier solve rate beside that of its newest group; 0: only the newest counts."""
    by: str | None = None
    """Field of the records, such as a level of difficulty: problems of equal values have one solve rate together. Left
    out: each problem has its own."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.band is not None and self.band[0] > self.band[1]:
            raise PydanticCustomError("curriculum", "band: the lowest solve rate is above the highest; swap them")
        return self
