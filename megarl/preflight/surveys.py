"""Surveys of a recipe's data sets, each read as in a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megarl.config import Recipe
from megarl.config.data_sets import DataSet, path_of
from megarl.data.problems import num_made
from megarl.data.survey import Survey, survey
from megarl.preflight.files import data_sets, field_names, kind_of_set, system_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def surveys(recipe: Recipe, tokenizer: Tokenizer | None) -> Iterator[tuple[str, Survey]]:
    """Survey each data set of a recipe; yield its field and the findings. Sets made by an environment are skipped.

    Training data are compared with the validation sets of their source. Without a tokenizer, lengths are in characters.
    Raises DataError if a file does not exist.
    """
    for source in recipe.sources:
        own = source.recipe
        sets = {field: each for field, each in data_sets(own).items() if num_made(path_of(each)) is None}
        heldout = [each for field, each in sets.items() if field.startswith("data.validation.")]
        for field, data_set in sets.items():
            others = heldout if field == "data.train" else []
            yield source.place(field), _survey(own, field, data_set, tokenizer, others)


def survey_as_training(recipe: Recipe, path: str, tokenizer: Tokenizer | None, heldout: Sequence[str]) -> Survey:
    """Survey a data set, read like the recipe's training data, and compare it with held-out sets."""
    return _survey(recipe, "data.train", path, tokenizer, heldout)


def _survey(
    recipe: Recipe, field: str, data_set: DataSet, tokenizer: Tokenizer | None, others: Sequence[DataSet]
) -> Survey:
    return survey(
        path_of(data_set),
        names=field_names(recipe, data_set, field),
        kind=kind_of_set(recipe, field),
        tokenizer=tokenizer,
        system_prompt=system_prompt(recipe),
        others={path_of(other): field_names(recipe, other) for other in others},
        has_answers=bool(recipe.reward.functions),
    )
