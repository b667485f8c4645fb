"""Reading of a recipe's data sets: problems, conversations and preferences, tokenised as in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl import rewards
from megarl.config import Recipe
from megarl.config.sections.data_sets import DataSet, path_of
from megarl.data.kinds.conversations import Conversations
from megarl.data.kinds.preferences import Judged, Pairs
from megarl.data.kinds.problems import Problems, make_placeholder_problems, num_made
from megarl.data.reader import Collect, Example, Kind, in_memory, read_examples
from megarl.data.record_fields import REWARD_MODEL
from megarl.data.records import TooLongError
from megarl.data.sources.harbor import FIELD, read_task, task_files
from megarl.data.streamed import Streamed
from megarl.datasets.environment_tools import tools_of_environment
from megarl.datasets.fields import (
    context_fields,
    data_paths,
    field_names,
    kind_of_set,
    max_tokens,
    system_prompt,
    unread_context_fields,
)
from megarl.types import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from megarl.data.kinds.conversations import Conversation
    from megarl.data.kinds.preferences import Answers


Dropped = Counter[str]
"""Number of records left out as too long, by data source."""


def collect_for(recipe: Recipe, folder: Path) -> Collect:
    """Return the function that stores examples: in memory, or with `data.streaming` in `folder`."""
    return partial(Streamed, folder=folder) if recipe.data.streaming else in_memory


def _read_examples(
    recipe: Recipe, data_set: DataSet, kind: Kind[Example], dropped: Dropped | None, collect: Collect
) -> Sequence[Example]:
    """Return the training examples of a data set.

    A too long record is an error. With `data.overlong: drop` it is left out and counted in `dropped`. Raises DataError
    if no record remains.
    """
    source = path_of(data_set)

    def count_dropped(_: TooLongError) -> None:
        if dropped is not None:
            dropped[source] += 1

    examples = read_examples(
        source,
        kind,
        names=field_names(recipe, data_set),
        on_long=count_dropped if recipe.data.overlong == "drop" else None,
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

    For `environment:COUNT` the environment generates problems; `is_heldout`: for validation. `name` is the source's
    name in messages. Too long prompts are counted in `dropped`. Raises DataError for an invalid line.
    """
    path = path_of(data_set)
    if (count := num_made(path)) is not None:
        generated_problems = make_placeholder_problems(
            count, tokenizer, system_prompt=system_prompt(recipe), is_heldout=is_heldout
        )
        return [replace(problem, source=name) for problem in generated_problems] if name else generated_problems
    curriculum = recipe.data.curriculum
    # The curriculum groups training problems by this field, so each record must have it. Validation has none.
    group_field = curriculum.by if curriculum.band is not None and not is_heldout else None
    required_fields = {} if is_heldout else context_fields(recipe)
    if group_field is not None:
        required_fields |= {group_field: "data.curriculum.by"}
    kind = Problems(
        tokenizer=tokenizer,
        system_prompt=system_prompt(recipe),
        max_tokens=max_tokens(recipe, "problems"),
        has_answers=bool(recipe.reward.functions),
        source_name=name,
        required_fields=required_fields,
        refused_fields={} if is_heldout else unread_context_fields(recipe),
        environment=recipe.rollout.environment,
        rewards=_list_reward_names(recipe),
        # Cached for all records: creating an environment may be slow.
        environment_tools=cache(partial(tools_of_environment, recipe)),
    )
    return _read_examples(recipe, data_set, kind, dropped, collect)


def _list_reward_names(recipe: Recipe) -> tuple[str, ...] | None:
    """Return the names of a recipe's rewards (servers: their kind), or None if nothing is rewarded."""
    names = [
        rewards.server_kind(function.name) or rewards.kind_of(function.name) for function in recipe.reward.functions
    ]
    return (*names, *((REWARD_MODEL,) if recipe.reward.model else ())) or None


def read_conversations(
    recipe: Recipe,
    tokenizer: Tokenizer,
    data_set: DataSet,
    dropped: Dropped | None = None,
    *,
    collect: Collect = in_memory,
) -> Sequence[Conversation]:
    """Read conversations for supervised training. Raises DataError if one is longer than a micro-batch."""
    kind = Conversations(
        tokenizer=tokenizer, system_prompt=system_prompt(recipe), max_tokens=max_tokens(recipe, "conversations")
    )
    return _read_examples(recipe, data_set, kind, dropped, collect)


def read_preferences(
    recipe: Recipe,
    tokenizer: Tokenizer,
    data_set: DataSet,
    dropped: Dropped | None = None,
    *,
    collect: Collect = in_memory,
) -> Sequence[Answers]:
    """Read answer pairs (kto: single judged answers). Raises DataError if an answer or pair is longer than a
    micro-batch.

    In the loop reward_model, each answer is scored at its last token only.
    """
    max_record_tokens, system_text = max_tokens(recipe, "pairs"), system_prompt(recipe)
    kind: Judged | Pairs
    if kind_of_set(recipe, "data.train") == "judged":
        kind = Judged(tokenizer=tokenizer, system_prompt=system_text, max_tokens=max_record_tokens)
    else:
        is_scored = recipe.loop == "reward_model"
        kind = Pairs(tokenizer=tokenizer, system_prompt=system_text, max_tokens=max_record_tokens, is_scored=is_scored)
    return _read_examples(recipe, data_set, kind, dropped, collect)


def harbor_tasks(recipe: Recipe) -> list[Mapping[str, Any]]:
    """Return the valid agent tasks in the recipe's data folders. The data survey reports the others."""
    tasks: list[Mapping[str, Any]] = []
    for path in data_paths(recipe).values():
        if Path(path).is_dir():
            with suppress(DataError):
                tasks += [read_task(file)[FIELD] for file in task_files(Path(path))]
    return tasks
