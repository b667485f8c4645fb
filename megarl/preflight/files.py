"""Checks of a recipe's data files before a run, and functions to read and survey the files."""

from __future__ import annotations

import errno
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megarl.config import DataConfig, Recipe
from megarl.config.recipe import error_page
from megarl.config.sections.data_sets import DataSet, DataSetConfig, path_of
from megarl.data.formats import FieldNames, first_name_with_value
from megarl.data.kinds import KindName
from megarl.data.kinds.conversations import Conversations
from megarl.data.kinds.preferences import Judged, Pairs
from megarl.data.kinds.problems import MADE, Problems, made_problems, num_made
from megarl.data.reader import (
    Collect,
    Example,
    Kind,
    OnLong,
    collect_count,
    in_memory,
    read_examples,
    read_records,
)
from megarl.data.records import Record, TooLongError
from megarl.data.sources.rows import data_files as found_files
from megarl.data.streamed import Streamed
from megarl.data.survey import Survey, survey
from megarl.planner.sizes import row_multiple
from megarl.preflight.environment_tools import tools_of_environment
from megarl.preflight.registry import Cost, checks
from megarl.rewards import system_prompt_of
from megarl.types import ConfigError, DataError, MegarlError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from megarl.data.kinds.conversations import Conversation
    from megarl.data.kinds.preferences import Answers


Dropped = Counter[str]
"""Number of records left out as too long, keyed by data source."""


RecordDigests = dict[str, str]
"""Number and digest of the training records remaining after leaving out long ones, keyed by recipe field."""


def count_records(
    recipe: Recipe, dropped: Dropped | None = None, digests: RecordDigests | None = None
) -> dict[str, int]:
    """Count the records of each data source, parsed and tokenised as in a run. Keys are `train` and the validation
    names.

    Records left out as too long are counted in `dropped`. Digests of the remaining training records go into `digests`.
    Raises one DataError with the first wrong line of each source.
    """
    dropped = Counter() if dropped is None else dropped
    digests = {} if digests is None else digests
    # Importing the tokenizer library is slow, so commands that only need the paths of data do not pay for it.
    from megarl.data.chat import tokenizer_of

    tokenizer = tokenizer_of(recipe.model)
    counts: dict[str, int] = {}
    broken: list[str] = []
    for source in recipe.sources:
        source_digests: RecordDigests = {}
        source_counts = _count_of_source(source.recipe, tokenizer, broken, dropped, source_digests)
        digests |= {
            f"mixture.{source.name}.{name}" if recipe.mixture else name: text for name, text in source_digests.items()
        }
        named_counts = {
            f"{source.name} train" if recipe.mixture and name == "train" else name: n
            for name, n in source_counts.items()
        }
        counts |= named_counts
    if broken:
        raise DataError(error_page(f"data of recipe {recipe.name}", list(dict.fromkeys(broken))))
    return counts


def with_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with train.steps computed from train.epochs and the number of training records.

    If the data cannot be read, the recipe is returned unchanged, and the checks of data report the error.
    """
    epochs, data = recipe.train.epochs, recipe.data
    if epochs is None:
        return recipe
    try:
        records = num_made(data.train)
        # Records are counted after dropping too long ones, which needs the tokenizer. Otherwise lines are enough.
        if records is None and data.overlong == "drop":
            records = count_records(recipe)["train"]
        elif records is None:
            records = sum(1 for _ in read_records(data.train))
    except (MegarlError, ValueError):
        return recipe
    # Compute with the decimal as written: in floating point 1.1 epochs of 100 records exceed 110.
    steps = math.ceil(Fraction(str(epochs)) * records / recipe.train.prompts_per_step)
    resolved = recipe.train.model_copy(update={"steps": steps})
    # `steps` is derived here, so it must not count as given by the user.
    resolved.model_fields_set.discard("steps")
    return recipe.model_copy(update={"train": resolved})


def _count_of_source(
    recipe: Recipe, tokenizer: Tokenizer, broken: list[str], dropped: Dropped, digests: RecordDigests
) -> dict[str, int]:
    """Count the records by recipe field, and add the errors of unreadable files to `broken`."""
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
            broken.append(str(error))
            continue
        # A resumed run compares these digests, because its record numbers must not shift. Validation data may change.
        if field in ("data.train", "data.ptx"):
            digests[field] = f"{counts[name]} records, {digest.hexdigest()}"
    return counts


def _count_and_hash(
    digest: blake2b, records: Iterable[Record], make: Callable[[int, Record], object], on_long: OnLong | None
) -> Sequence[int]:
    """Count the records, and hash the position of each one that is not dropped."""

    def noting(index: int, record: Record) -> None:
        make(index, record)
        digest.update(index.to_bytes(8, "little"))

    return collect_count(records, noting, on_long)


def _count_name(field: str) -> str:
    """Return the name of a recipe field's data set in a table of counts."""
    kind, _, name = field.removeprefix("data.").partition(".")
    return f"{name} (conversations)" if kind == "validation_conversations" else name or kind


def field_names(recipe: Recipe, data_set: DataSet, field: str | None = None) -> FieldNames:
    """Return the names of a data set's record fields: its own, or those under `data`.

    `field` is the recipe field in the error's remedy. Default: the first recipe field with this data set.
    """
    has_own = isinstance(data_set, DataSetConfig) and data_set.has_own_names
    settings = data_set if has_own else recipe.data
    assert isinstance(settings, DataSetConfig | DataConfig)
    fields = {str(role): name for role, name in settings.fields.items()}
    return FieldNames(settings.format, fields, settings.answer_field, _remedy(recipe, data_set, field, has_own))


def _remedy(recipe: Recipe, data_set: DataSet, field: str | None, has_own: bool) -> str:
    """Return the command-line override that sets the record field names of a data set."""
    field = field or next(
        (field for field, candidate in data_sets(recipe).items() if candidate == data_set), "data.train"
    )
    alone = f"'{field}={{path: {path_of(data_set)}, fields: {{}}}}'"
    if has_own:
        return alone
    return "'data.fields={}'" if field == "data.train" else f"'data.fields={{}}', or for this set alone {alone}"


def recognised_formats(recipe: Recipe) -> dict[str, str]:
    """Return each training source's recognised format with the names of its record fields: `verl (prompt prompt, ...)`.

    If a source has several files, their number follows.
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
            files = len(found_files(source.recipe.data.train))
            num_files = f", {files} files" if files > 1 else ""
            formats[source.place("data.train")] = f"{record.format.name} ({fields}){num_files}"
    return formats


def collect_for(recipe: Recipe, folder: Path) -> Collect:
    """Return a function that collects training records: in memory, or with `data.streaming` in files of a folder."""
    return partial(Streamed, folder=folder) if recipe.data.streaming else in_memory


def _read_examples(
    recipe: Recipe, data_set: DataSet, kind: Kind[Example], dropped: Dropped | None, collect: Collect
) -> Sequence[Example]:
    """Return the training examples of a data set.

    A record that is too long raises an error. With `data.overlong` = drop, it is left out and counted in `dropped`.
    Raises DataError if no record is left.
    """
    source = path_of(data_set)

    def drop(_: TooLongError) -> None:
        if dropped is not None:
            dropped[source] += 1

    examples = read_examples(
        source,
        kind,
        names=field_names(recipe, data_set),
        on_long=drop if recipe.data.overlong == "drop" else None,
        collect=collect,
    )
    if not examples:
        raise DataError(
            f"{source}: every record is too long, so data.overlong = drop leaves none; raise data.max_prompt_tokens or "
            "trainer.max_tokens_per_microbatch"
        )
    return examples


def read_problems(
    recipe: Recipe,
    tokenizer: Tokenizer,
    data_set: DataSet,
    dropped: Dropped | None = None,
    *,
    name: str = "",
    is_heldout: bool = False,
    collect: Collect = in_memory,
) -> Sequence[Problem]:
    """Read the problems (prompts with gold answers) of a data source, tokenised as in a run of this recipe.

    If the source is `environment:COUNT`, the environment makes them; `is_heldout` asks it for validation problems.
    `name` is the name of the source in messages. Prompts left out as too long are counted in `dropped`. DataError names
    a wrong line.
    """
    path = path_of(data_set)
    if (count := num_made(path)) is not None:
        generated = made_problems(count, tokenizer, system_prompt=system_prompt(recipe), is_heldout=is_heldout)
        return [replace(problem, source=name) for problem in generated] if name else generated
    curriculum = recipe.data.curriculum
    # The curriculum groups training problems by this field, so each record must have it. Validation has none.
    by = curriculum.by if curriculum.band is not None and not is_heldout else None
    kind = Problems(
        tokenizer=tokenizer,
        system_prompt=system_prompt(recipe),
        max_tokens=_max_tokens(recipe, "problems"),
        has_answers=bool(recipe.reward.functions),
        source_name=name,
        required_field=by,
        # Once for all records: an environment may load much when it is made.
        environment_tools=cache(partial(tools_of_environment, recipe)),
    )
    return _read_examples(recipe, data_set, kind, dropped, collect)


def system_prompt(recipe: Recipe) -> str | None:
    """Return the system message for conversations without one, or None.

    Raises ConfigError if `data.system_prompt` is `default`, and no reward function has an instruction about its format.
    """
    setting = recipe.data.system_prompt
    if setting in (None, "none"):
        return None
    if setting != "default":
        return setting
    # Only loops with an engine use reward functions, so only they have a default prompt.
    functions = recipe.reward.functions if recipe.has_engine else ()
    prompts = (system_prompt_of(function.name, function.kwargs) for function in functions)
    prompt = next((prompt for prompt in prompts if prompt is not None), None)
    if prompt is None:
        names = [function.name for function in functions]
        raise ConfigError(
            "data.system_prompt = default: would use the format instruction of a reward function, but "
            f"{', '.join(names) or 'this recipe'} has none; write the system message itself, or remove the field"
        )
    return prompt


def read_conversations(
    recipe: Recipe,
    tokenizer: Tokenizer,
    data_set: DataSet,
    dropped: Dropped | None = None,
    *,
    collect: Collect = in_memory,
) -> Sequence[Conversation]:
    """Read the conversations of a data source for supervised training. Raises DataError if one exceeds a microbatch."""
    kind = Conversations(
        tokenizer=tokenizer, system_prompt=system_prompt(recipe), max_tokens=_max_tokens(recipe, "conversations")
    )
    return _read_examples(recipe, data_set, kind, dropped, collect)


def _max_tokens(recipe: Recipe, kind: KindName) -> int:
    """Return the most tokens that a recipe allows in a record: in a prompt, a conversation, or a pair together."""
    if kind == "problems":
        return recipe.data.max_prompt_tokens
    # A row is padded up to a multiple, so the longest sequence is the limit rounded down.
    multiple = row_multiple(recipe)
    longest = recipe.trainer.max_tokens_per_microbatch // multiple * multiple
    if kind == "conversations":
        return longest
    # Both answers of a pair share a row and are padded one by one. Padding may then take up to two multiples.
    longest -= 2 * multiple if multiple > 1 else 0
    # A scored answer has one more position.
    return longest - 2 if recipe.loop == "reward_model" else longest


def read_preferences(
    recipe: Recipe,
    tokenizer: Tokenizer,
    data_set: DataSet,
    dropped: Dropped | None = None,
    *,
    collect: Collect = in_memory,
) -> Sequence[Answers]:
    """Read the answer pairs of a data source (kto: single labelled answers). Raises DataError if one exceeds a
    microbatch.

    In loop reward_model each answer is scored at its last token only (see `data.kinds.preferences.with_score_mask`).
    """
    longest, prompt = _max_tokens(recipe, "pairs"), system_prompt(recipe)
    kind: Judged | Pairs
    if kind_of_set(recipe, "data.train") == "judged":
        kind = Judged(tokenizer=tokenizer, system_prompt=prompt, max_tokens=longest)
    else:
        is_scored = recipe.loop == "reward_model"
        kind = Pairs(tokenizer=tokenizer, system_prompt=prompt, max_tokens=longest, is_scored=is_scored)
    return _read_examples(recipe, data_set, kind, dropped, collect)


@checks("runs_folder", Cost.FILES)
def runs_folder(recipe: Recipe) -> Iterator[str]:
    """Yield an error if the run folder cannot be created. A folder is made in the nearest existing parent and removed.

    A full disk is not an error of the recipe: the run itself ends with an exit code for it.
    """
    runs_path = Path(recipe.runs_folder).absolute()
    nearest = next(folder for folder in (runs_path, *runs_path.parents) if folder.exists())
    try:
        with TemporaryDirectory(dir=nearest, prefix=".megarl-"):
            pass
    except OSError as error:
        # Full disk, exceeded quota and I/O errors pass here: waiting or another disk helps, editing the recipe does
        # not.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return
        yield (
            f"runs_folder = {recipe.runs_folder}: cannot write in {nearest} ({error.strerror}); set runs_folder to a "
            "writable folder"
        )


def data_paths(recipe: Recipe) -> dict[str, str]:
    """Return the paths of the recipe's data files by field name."""
    paths: dict[str, str] = {}
    for source in recipe.sources:
        sets = data_sets(source.recipe)
        paths |= {source.place(field): path_of(data_set) for field, data_set in sets.items()}
    return paths


def data_sets(recipe: Recipe) -> dict[str, DataSet]:
    """Return the data sets in the recipe of one source, keyed by recipe field."""
    data = recipe.data
    sets: dict[str, DataSet] = {"data.train": data.train}
    sets |= {f"data.validation.{name}": data_set for name, data_set in data.validation.items()}
    sets |= {
        f"data.validation_conversations.{name}": conversations
        for name, conversations in data.validation_conversations.items()
    }
    return sets | ({"data.ptx": data.ptx} if data.ptx else {})


def kind_of_set(recipe: Recipe, field: str) -> KindName:
    """Return the kind of training examples (problems, conversations, pairs) in a recipe field's data set."""
    if recipe.loop in ("preference", "reward_model"):
        return "judged" if recipe.loop == "preference" and recipe.preference.loss == "kto" else "pairs"
    is_trained_text = field == "data.train" and recipe.loop == "sft"
    is_conversations = field == "data.ptx" or field.startswith("data.validation_conversations.")
    return "conversations" if is_trained_text or is_conversations else "problems"


def takes_problems(recipe: Recipe, field: str) -> bool:
    """Return whether the data set of a recipe field holds problems, for which the policy samples answers."""
    return kind_of_set(recipe, field) == "problems"


@checks("data")
def made_sources(recipe: Recipe) -> Iterator[str]:
    """Yield errors of data sets written as `environment:COUNT`."""
    for field, path in data_paths(recipe).items():
        try:
            is_made = num_made(path) is not None
        except ValueError as error:
            yield f"{field} = {path}: {error}"
            continue
        if is_made and not takes_problems(recipe, field):
            yield (
                f"{field} = {path}: an environment makes only problems, but this field needs records of another kind; "
                "give a file"
            )


@checks("data", Cost.FILES)
def data_files(recipe: Recipe) -> Iterator[DataError]:
    """Yield errors of data files: missing, unreadable or empty."""
    for field, path in data_paths(recipe).items():
        if path.startswith(MADE):
            continue
        try:
            files = found_files(path)
        except DataError as error:
            fault = str(error).partition(": ")[2]
            is_absent = fault.startswith("no such file")
            yield DataError(f"{path}: {field} {'is not there' if is_absent else 'cannot be read'}: {fault}")
            continue
        # An empty file parses as zero records, so without this check a run would end in a confusing error later.
        empty = (file for file in files if not file.stat().st_size)
        yield from (DataError(f"{file}: {field} is empty; write records into it") for file in empty)


def surveys(recipe: Recipe, tokenizer: Tokenizer | None) -> Iterator[tuple[str, Survey]]:
    """Survey each data set of a recipe (errors, lengths, duplicates). Yields the recipe field and the survey.

    Data sets made by an environment are skipped. Training data are compared with the validation sets of their source.
    Without a tokenizer, lengths are in characters. Raises DataError if a file does not exist.
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
    """Survey one data set, read like the recipe's training data. Its prompts are compared with those of held-out
    sets."""
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
        max_tokens=_max_tokens(recipe, kind),
        drops_long=recipe.data.overlong == "drop",
    )
