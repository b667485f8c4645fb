"""Number of records read by a recipe's run, and number of steps of its epochs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from megarl.config import Recipe
from megarl.config.recipe import error_page
from megarl.data.formats import first_name_with_value
from megarl.data.kinds.problems import num_made
from megarl.data.reader import OnLong, collect_count, read_records
from megarl.data.records import Record
from megarl.data.sources.rows import data_files
from megarl.datasets.fields import data_sets, field_names, kind_of_set
from megarl.datasets.reading import Dropped, read_conversations, read_preferences, read_problems
from megarl.types import DataError, MegarlError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


RecordDigests = dict[str, str]
"""Number and digest of the training records, by recipe field. Records left out as too long do not count."""


def count_records(
    recipe: Recipe, dropped: Dropped | None = None, digests: RecordDigests | None = None
) -> dict[str, int]:
    """Count the records of each data source, parsed and tokenised as in a run. Keys: `train` and validation names.

    Too long records are counted in `dropped`. Digests of the other training records go into `digests`. Raises one
    DataError with the first invalid line of each source.
    """
    dropped = Counter() if dropped is None else dropped
    digests = {} if digests is None else digests
    # Imported here, because the tokenizer library is slow to import and other functions do not need it.
    from megarl.data.chat import tokenizer_of

    tokenizer = tokenizer_of(recipe.model)
    counts: dict[str, int] = {}
    file_errors: list[str] = []
    for source in recipe.sources:
        source_digests: RecordDigests = {}
        source_counts = _count_source(source.recipe, tokenizer, file_errors, dropped, source_digests)
        digests |= {
            f"mixture.{source.name}.{name}" if recipe.mixture else name: text for name, text in source_digests.items()
        }
        named_counts = {
            f"{source.name} train" if recipe.mixture and name == "train" else name: count
            for name, count in source_counts.items()
        }
        counts |= named_counts
    if file_errors:
        # Sources of a mixture may share a file, and its error is listed once.
        raise DataError(error_page(f"data of recipe {recipe.name}", list(dict.fromkeys(file_errors))))
    return counts


def with_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with train.steps computed from train.epochs and the number of training records.

    For unreadable data the recipe is returned unchanged: other checks report the error.
    """
    epochs, data = recipe.train.epochs, recipe.data
    if epochs is None:
        return recipe
    try:
        # The number of generated problems; None: the data are files.
        num_records = num_made(data.train)
        # Records are counted after dropping too long ones, which needs the tokenizer. Otherwise lines are enough.
        if num_records is None and data.overlong == "drop":
            num_records = count_records(recipe)["train"]
        elif num_records is None:
            num_records = sum(1 for _ in read_records(data.train))
    except (MegarlError, ValueError):
        return recipe
    # Compute with the decimal as written: in floating point 1.1 epochs of 100 records exceed 110.
    steps = math.ceil(Fraction(str(epochs)) * num_records / recipe.train.prompts_per_step)
    train_section = recipe.train.model_copy(update={"steps": steps})
    # The user did not set the computed `steps`.
    train_section.model_fields_set.discard("steps")
    return recipe.model_copy(update={"train": train_section})


def _count_source(
    recipe: Recipe, tokenizer: Tokenizer, file_errors: list[str], dropped: Dropped, digests: RecordDigests
) -> dict[str, int]:
    """Count the records by recipe field, and add the errors of unreadable files to `file_errors`."""
    counts: dict[str, int] = {}
    for field, data_set in data_sets(recipe).items():
        name = _count_name(field)
        digest = blake2b(digest_size=16)
        collect = partial(_count_and_hash, digest)
        kind = kind_of_set(recipe, field)
        try:
            if kind in ("pairs", "judged"):
                counts[name] = len(read_preferences(recipe, tokenizer, data_set, dropped, collect=collect))
            elif kind == "conversations":
                counts[name] = len(read_conversations(recipe, tokenizer, data_set, dropped, collect=collect))
            else:
                is_heldout = field != "data.train"
                problems = read_problems(recipe, tokenizer, data_set, dropped, is_heldout=is_heldout, collect=collect)
                counts[name] = len(problems)
        except DataError as error:
            file_errors.append(str(error))
            continue
        # A resumed run compares these digests, because its record numbers must not shift. Validation data may change.
        if field in ("data.train", "data.ptx"):
            digests[field] = f"{counts[name]} records, {digest.hexdigest()}"
    return counts


def _count_and_hash(
    digest: blake2b, records: Iterable[Record], make: Callable[[int, Record], object], on_long: OnLong | None
) -> Sequence[int]:
    """Count the records, and hash the position of each record that is not dropped. Returns a sequence of that
    length.
    """

    def make_and_hash(index: int, record: Record) -> None:
        """Make the example, so that a record to be dropped raises an error and is not hashed."""
        make(index, record)
        # The text is not hashed: a changed text shifts no record numbers.
        digest.update(index.to_bytes(8, "little"))

    return collect_count(records, make_and_hash, on_long)


def _count_name(field: str) -> str:
    kind, _, name = field.removeprefix("data.").partition(".")
    return f"{name} (conversations)" if kind == "validation_conversations" else name or kind


def recognised_formats(recipe: Recipe) -> dict[str, str]:
    """Return each training source's format, record fields by role, and number of files if it has several.

    For example `verl (prompt prompt, answer reward_model.ground_truth), 3 files`. Generated data have no format.
    """
    formats: dict[str, str] = {}
    for source in recipe.sources:
        if num_made(source.recipe.data.train) is None:
            train = source.recipe.data.train
            record = next(read_records(train, field_names(source.recipe, train)))
            roles = ("answer",) if recipe.is_on_policy else ("response", "chosen", "rejected")
            names = {
                role: first_name_with_value(record.fields, getattr(record.format, role))
                for role in ("prompt", "input", *roles)
            }
            fields = ", ".join(f"{role} {name}" for role, name in names.items() if name)
            num_files = len(data_files(source.recipe.data.train))
            files_text = f", {num_files} files" if num_files > 1 else ""
            formats[source.place("data.train")] = f"{record.format.name} ({fields}){files_text}"
    return formats
