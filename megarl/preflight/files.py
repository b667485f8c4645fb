"""A recipe's data files: whether they are there, and what is in them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megarl.config import Recipe
from megarl.config.recipe import error_page
from megarl.data.problems import MADE, num_made
from megarl.preflight.sizes import row_multiple
from megarl.rewards import SYSTEM_PROMPTS
from megarl.types import ConfigError, DataError, Problem, TrainingSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from megarl.data.preferences import Answers


def count_records(recipe: Recipe) -> dict[str, int]:
    """Records of each data file, `train` and the validation names, parsed and rendered as the run will.

    Raises one DataError with the first faulty line of each file.
    """
    from megarl.data.chat import load_tokenizer

    tokenizer = load_tokenizer(recipe.model.path)
    counts: dict[str, int] = {}
    broken: list[str] = []
    for source in recipe.sources:
        found = _count_of_source(source.recipe, tokenizer, broken)
        named = {f"{source.name} train" if recipe.mixture and name == "train" else name: n for name, n in found.items()}
        counts |= named
    if broken:
        raise DataError(error_page(f"data of recipe {recipe.name}", list(dict.fromkeys(broken))))
    return counts


def _count_of_source(recipe: Recipe, tokenizer: Tokenizer, broken: list[str]) -> dict[str, int]:
    """Records by data file; what is wrong with one is added to `broken`."""
    data = recipe.data
    files = {"train": data.train, **data.validation, **({"ptx": data.ptx} if data.ptx else {})}
    files |= {f"{name} (conversations)": path for name, path in data.validation_conversations.items()}
    conversations = {data.ptx, *data.validation_conversations.values(), data.train if recipe.loop == "sft" else None}
    counts: dict[str, int] = {}
    for name, path in files.items():
        try:
            if recipe.loop in ("preference", "reward_model"):
                counts[name] = len(read_preferences(recipe, tokenizer, path))
            elif path in conversations:
                counts[name] = len(read_conversations(recipe, tokenizer, path))
            else:
                counts[name] = len(read_problems(recipe, tokenizer, path, is_heldout=name != "train"))
        except DataError as error:
            broken.append(str(error))
    return counts


def read_problems(recipe: Recipe, tokenizer: Tokenizer, path: str, *, is_heldout: bool = False) -> list[Problem]:
    """The problems of a data file, as a run of this recipe renders them; DataError names a faulty line.

    Or those that its environment makes; `is_heldout` says that they are for validation.
    """
    from megarl.data import problems

    if (count := problems.num_made(path)) is not None:
        return problems.made_problems(count, tokenizer, system_prompt=system_prompt(recipe), is_heldout=is_heldout)
    found = problems.read_problems(
        path,
        tokenizer,
        answer_field=recipe.data.answer_field,
        system_prompt=system_prompt(recipe),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
    )
    curriculum = recipe.data.curriculum
    if curriculum.band is not None and curriculum.by is not None and not is_heldout:
        for problem in found:
            if curriculum.by not in problem.record:
                raise DataError(
                    f"{path}: problem {problem.index} has no field {curriculum.by!r} of data.curriculum.by; "
                    "add it to every record, or name another"
                )
    return found


def system_prompt(recipe: Recipe) -> str | None:
    """The system message of conversations that have none; None: no message.

    Raises ConfigError where the default is asked for and no reward function has one.
    """
    given = recipe.data.system_prompt
    if given in (None, "none"):
        return None
    if given != "default":
        return given
    names = [function.name for function in recipe.reward.functions] if recipe.has_engine else []
    prompts = [SYSTEM_PROMPTS[name] for name in names if name in SYSTEM_PROMPTS]
    if not prompts:
        raise ConfigError(
            "data.system_prompt = default: is the instruction of a reward function's format, and "
            f"{', '.join(names) or 'this recipe'} has none; give the text itself, or leave it out"
        )
    return prompts[0]


def read_conversations(recipe: Recipe, tokenizer: Tokenizer, path: str) -> list[TrainingSequence]:
    """The conversations of a data file, each fitting a padded row."""
    from megarl.data import conversations

    longest = recipe.trainer.max_tokens_per_microbatch // row_multiple(recipe) * row_multiple(recipe)
    return conversations.read_conversations(path, tokenizer, system_prompt=system_prompt(recipe), max_tokens=longest)


def read_preferences(recipe: Recipe, tokenizer: Tokenizer, path: str) -> list[Answers]:
    """The pairs of a data file, or for kto its judged answers, each fitting a row however it is padded.

    For a reward model, sequences whose last place alone counts (`data.preferences.scored`).
    """
    from megarl.data import preferences

    multiple = row_multiple(recipe)
    longest = recipe.trainer.max_tokens_per_microbatch // multiple * multiple - (2 * multiple if multiple > 1 else 0)
    if recipe.loop == "reward_model":
        pairs = preferences.read_preferences(
            path, tokenizer, system_prompt=system_prompt(recipe), max_tokens=longest - 2
        )
        return [(preferences.scored(chosen), preferences.scored(rejected)) for chosen, rejected in pairs]
    read = preferences.read_judged if recipe.preference.loss == "kto" else preferences.read_preferences
    return read(path, tokenizer, system_prompt=system_prompt(recipe), max_tokens=longest)


def runs_folder(recipe: Recipe) -> Iterator[str]:
    """Whether the run's folder can be made: tried in the nearest folder that is there, and taken back.

    A full disk is no fault of the recipe: the run itself ends with its own code.
    """
    wanted = Path(recipe.runs_folder).absolute()
    nearest = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    try:
        with TemporaryDirectory(dir=nearest, prefix=".megarl-"):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return
        yield (
            f"runs_folder = {recipe.runs_folder}: nothing can be written in {nearest} ({error.strerror}); set "
            "runs_folder to a folder that can be written"
        )


def data_paths(recipe: Recipe) -> dict[str, str]:
    """The recipe's data files, by the fields that name them."""
    found: dict[str, str] = {}
    for source in recipe.sources:
        found |= {source.place(field): path for field, path in _paths_of_source(source.recipe).items()}
    return found


def _paths_of_source(recipe: Recipe) -> dict[str, str]:
    data = recipe.data
    paths = {"data.train": data.train}
    paths |= {f"data.validation.{name}": path for name, path in data.validation.items()}
    paths |= {f"data.validation_conversations.{name}": path for name, path in data.validation_conversations.items()}
    return paths | ({"data.ptx": data.ptx} if data.ptx else {})


def takes_problems(recipe: Recipe, field: str) -> bool:
    """Whether what a field of the data names are problems to sample answers to."""
    if recipe.loop == "rl":
        return field == "data.train" or field.startswith("data.validation.")
    return recipe.loop == "sft" and field.startswith("data.validation.")


def made_sources(recipe: Recipe) -> Iterator[str]:
    """Faults of the data that the environment is to make."""
    for field, path in data_paths(recipe).items():
        try:
            is_made = num_made(path) is not None
        except ValueError as error:
            yield f"{field} = {path}: {error}"
            continue
        if is_made and not takes_problems(recipe, field):
            yield f"{field} = {path}: an environment makes problems, which are not what this holds; give a JSONL file"


def data_files(recipe: Recipe) -> Iterator[str]:
    for field, path in data_paths(recipe).items():
        if path.startswith(MADE):
            continue
        if not Path(path).is_file():
            yield f"{path}: {field} is not there; give the path of a JSONL file"
        elif not Path(path).stat().st_size:
            yield f"{path}: {field} is empty; write one JSON record a line"
