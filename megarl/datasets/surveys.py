"""Surveys of a recipe's data sets: errors, lengths and duplicates of their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megarl.config import Recipe
from megarl.config.sections.data_sets import DataSet, path_of
from megarl.data.kinds.problems import num_made
from megarl.data.survey import Survey, survey
from megarl.datasets.fields import data_sets, field_names, kind_of_set, max_tokens, system_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def surveys(recipe: Recipe, tokenizer: Tokenizer | None) -> Iterator[tuple[str, Survey]]:
    """Survey each data set of a recipe (errors, lengths, duplicates). Yields the recipe field and the survey.

    Generated data sets are skipped. Training data are compared with the validation sets of their source. Without a
    tokenizer, lengths are in characters. Raises DataError if a file does not exist.
    """
    for source in recipe.sources:
        source_recipe = source.recipe
        sets = {
            field: data_set
            for field, data_set in data_sets(source_recipe).items()
            if num_made(path_of(data_set)) is None
        }
        heldout = [data_set for field, data_set in sets.items() if field.startswith("data.validation.")]
        for field, data_set in sets.items():
            compared_sets = heldout if field == "data.train" else []
            yield source.place(field), _survey(source_recipe, field, data_set, tokenizer, compared_sets)


def survey_as_training(recipe: Recipe, path: str, tokenizer: Tokenizer | None, heldout: Sequence[str]) -> Survey:
    """Survey a data set as training data, and compare its prompts with the `heldout` sets."""
    return _survey(recipe, "data.train", path, tokenizer, heldout)


def _survey(
    recipe: Recipe, field: str, data_set: DataSet, tokenizer: Tokenizer | None, compared_sets: Sequence[DataSet]
) -> Survey:
    kind = kind_of_set(recipe, field)
    return survey(
        path_of(data_set),
        names=field_names(recipe, data_set, field),
        kind=kind,
        tokenizer=tokenizer,
        system_prompt=system_prompt(recipe),
        other_sources={path_of(heldout_set): field_names(recipe, heldout_set) for heldout_set in compared_sets},
        has_answers=bool(recipe.reward.functions),
        max_tokens=max_tokens(recipe, kind),
        drops_long=recipe.data.overlong == "drop",
    )
