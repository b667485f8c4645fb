"""Sources of problems. A run has one source, or one per entry of its mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.config import Recipe, SamplingConfig
from megarl.data.curriculum import Curriculum
from megarl.data.mixture import Mixture, SourceStream
from megarl.data.sampler import DataOrder
from megarl.rollout.groups import GroupSampler
from megarl.types import Problem, SamplingSettings


@dataclass(frozen=True, slots=True)
class Source:
    """A named source of problems, with its own sampler. `recipe` is the run's, with the source's own settings."""

    name: str
    weight: float
    recipe: Recipe
    sampler: GroupSampler
    problems: Sequence[Problem] = ()
    """Training problems. Each carries the name of this source."""
    validation: Mapping[str, Sequence[Problem]] = field(default_factory=dict)
    served_metrics: Callable[[], Mapping[str, float]] = dict
    """Returns and resets the counts of the source's scoring, for example calls to scoring servers."""

    def sampling(self, step: int) -> SamplingSettings:
        config = self.recipe.rollout.sampling
        return sampling_settings(config, config.temperature_at(step, self.recipe.train.steps))


def served_metrics(sources: Sequence[Source]) -> dict[str, float]:
    """Return the counts of all sources' scoring since the last call, for example `reward/NAME/calls`."""
    total: dict[str, float] = {}
    for source in sources:
        for name, value in source.served_metrics().items():
            total[name] = total.get(name, 0.0) + value
    return total


def make_mixture(sources: Sequence[Source], seed: int) -> Mixture:
    """Return the mixture from which prompts of these sources are drawn, by their weights."""
    streams = [
        SourceStream(
            source.name,
            source.weight,
            source.problems,
            # One item at a time: the mixture chooses the source anew for each prompt.
            DataOrder(len(source.problems), 1, seed, source.recipe.data.shuffle),
            Curriculum.of(source.problems, source.recipe.data.curriculum),
        )
        for source in sources
    ]
    return Mixture(streams, seed)


def with_stop_tokens(recipe: Recipe, token_ids: Sequence[int]) -> Recipe:
    """Return the recipe with additional stop tokens, for training and evaluations."""
    if not token_ids:
        return recipe
    rollout, evaluation = recipe.rollout, recipe.evaluation
    training_update = {"stop_token_ids": (*rollout.sampling.stop_token_ids, *token_ids)}
    rollout = rollout.model_copy(update={"sampling": rollout.sampling.model_copy(update=training_update)})
    # An evaluation without stop tokens uses the training's. So only an evaluation's own list needs the addition.
    if (stop_token_ids := evaluation.sampling.stop_token_ids) is not None:
        evaluation_sampling = evaluation.sampling.model_copy(update={"stop_token_ids": (*stop_token_ids, *token_ids)})
        evaluation = evaluation.model_copy(update={"sampling": evaluation_sampling})
    return recipe.model_copy(update={"rollout": rollout, "evaluation": evaluation})


def sampling_settings(
    config: SamplingConfig, temperature: float | None = None, *, repetition_penalty: float = 1.0
) -> SamplingSettings:
    """Return the sampling parameters of a section of the recipe. `temperature` replaces the section's value."""
    return SamplingSettings(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature if temperature is None else temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=repetition_penalty,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
    )
