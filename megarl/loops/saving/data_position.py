"""Position of a run in data that gives each step a fixed number of records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from megarl.config import Recipe, TrainConfig
from megarl.config.sections.learning import AlgorithmConfig
from megarl.data.sampler import DataOrder
from megarl.loops.saving.driver_state import saved_value

_BATCH_SIZES: Mapping[str, tuple[str, int]] = {
    "data.train": ("train.prompts_per_step", TrainConfig().prompts_per_step),
    "data.ptx": ("algorithm.ptx_conversations", AlgorithmConfig().ptx_conversations),
}
"""(recipe field with the records per step, its default), by the field of the data."""

_ON_POLICY = ("rl", "distillation")
"""Loops that count their position in `data.train` themselves."""


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Records drawn up to the end of a step, by recipe field (`data.train`, `data.ptx`).

    A resumed run can draw another number per step, so the step alone does not determine the position. On-policy loops
    count their position in `data.train` themselves (`rollout.state`).
    """

    step: int = 0
    drawn: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_checkpoint(cls, step: int, driver: Mapping[str, Any]) -> Self:
        """Return the position stored in a checkpoint's driver.json. `step` is the checkpoint's step.

        Checkpoints of earlier versions have none. Each of their steps drew as many records as their recipe says.
        """
        if (drawn_counts := driver.get("drawn")) is not None:
            return cls(step, {name: int(count) for name, count in drawn_counts.items()})
        recipe = driver["recipe"]
        # On-policy loops have their position in data.train in `rollout.state`.
        data_fields = ["data.ptx"] if recipe.get("loop") in _ON_POLICY else _BATCH_SIZES
        drawn: dict[str, int] = {}
        for name in data_fields:
            size_field, default_size = _BATCH_SIZES[name]
            if saved_value(recipe, name):
                drawn[name] = step * (saved_value(recipe, size_field) or default_size)
        return cls(step, drawn)

    def after(self, step: int, recipe: Recipe) -> Self:
        """Return the position at the end of a later step of a run that continues from this one."""
        counts = {
            name: self.drawn.get(name, 0) + (step - self.step) * size for name, size in _batch_sizes(recipe).items()
        }
        # Keep the counts of data that this recipe leaves out: a later start may have them again.
        return type(self)(step, {**self.drawn, **counts})

    def order(self, recipe: Recipe, name: str, num_items: int) -> DataOrder:
        """Return the order in which steps draw records of the data in field `name`, from this position on."""
        return DataOrder(
            num_items,
            _batch_sizes(recipe)[name],
            recipe.seed,
            recipe.data.shuffle,
            first_step=self.step,
            num_drawn=self.drawn.get(name, 0),
        )

    def as_json(self) -> dict[str, int]:
        return dict(self.drawn)


def _batch_sizes(recipe: Recipe) -> dict[str, int]:
    """Return how many records each step draws, by the field of the data."""
    sizes = {} if recipe.is_on_policy else {"data.train": recipe.train.prompts_per_step}
    return sizes | ({"data.ptx": recipe.algorithm.ptx_conversations} if recipe.data.ptx else {})
