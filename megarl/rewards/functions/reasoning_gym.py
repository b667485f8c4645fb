"""Rewards by the scorers of reasoning-gym: `reasoning_gym.TASK`, or `reasoning_gym` for the task of each record.

This module has each task's reward function as an attribute.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

from megarl.files.nearest import nearest
from megarl.files.strict_json import make_object
from megarl.rewards.functions.final_answers import answering_text, final_text, last_boxed, last_tagged
from megarl.rewards.functions.harmless import CORRECT_FROM, is_formula, is_integer_arithmetic, is_literal, score_safely
from megarl.types import ConfigError, Reward

Place = Literal["tags", "boxed", "text"]

_MAX_CHARACTERS = 20_000
"""Maximum characters of an answer; a longer answer scores zero. Some scorers take time in a power of the length."""

_BOARDS = ("arc_agi", "rearc")
"""Tasks whose scorers compare tuples. JSON turns tuples into lists, so they are converted back."""


def reasoning_gym(
    completion_text: str,
    answer: Any,
    record: Mapping[str, Any],
    *,
    in_thoughts: bool = False,
    correct_score: float = 1.0,
    place: Place = "tags",
) -> Reward:
    """Score the answer by the scorer of the task in the record's `metadata.source_dataset`.

    `scorer_of` describes the other arguments. Metric: the mean score per task, under the task's name.
    """
    task = task_of(record)
    text = answering_text(completion_text, in_thoughts=in_thoughts)
    reward = _score_completion(task, text, answer, record, correct_score, place, {})
    return Reward(
        reward.score,
        reward.format_valid,
        reward.answer_correct,
        metrics={task: reward.metrics["raw"], **reward.metrics},
    )


def scorer_of(task: str) -> Callable[..., Reward]:
    r"""Return the reward function of one reasoning-gym task.

    It passes the last <answer> tags, the last \boxed{} or the completion without thoughts (`place`) to the task's
    scorer, and multiplies the score by `correct_score`. An answer is right from a score of 0.99 on. The record needs
    reasoning-gym's `metadata`, an object or its JSON, at the top or in `extra_info`. `config` has the task's settings,
    if its scorer depends on them. A completion ending inside its thoughts counts as empty. If the scorer evaluates
    answers as code, an answer that is neither literal nor formula counts as empty. Metric: `raw`, the scorer's own
    value.
    """

    def score(
        completion_text: str,
        answer: Any,
        record: Mapping[str, Any],
        *,
        in_thoughts: bool = False,
        correct_score: float = 1.0,
        place: Place = "tags",
        config: Mapping[str, Any] | None = None,
    ) -> Reward:
        text = answering_text(completion_text, in_thoughts=in_thoughts)
        return _score_completion(task, text, answer, record, correct_score, place, config or {})

    return score


def __getattr__(name: str) -> Callable[..., Reward]:
    # Python asks for private names (such as __path__) too; they are not tasks.
    if name.startswith("_"):
        raise AttributeError(name)
    check_task(name)
    return scorer_of(name)


def check_task(task: str) -> None:
    """Raise ConfigError for a task unknown to reasoning-gym."""
    _check_installed()
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task == "composite":
        raise ConfigError(
            "reward.functions: 'reasoning_gym.composite': is made of several tasks; use reasoning_gym, the reward that "
            "scores each record by its own task"
        )
    if task in DATASETS:
        return
    similar_task = nearest(task, DATASETS)
    hint = f"did you mean reasoning_gym.{similar_task}?" if similar_task else f"it has {', '.join(sorted(DATASETS))}"
    version = reasoning_gym.__version__
    raise ConfigError(f"reward.functions: 'reasoning_gym.{task}': reasoning-gym {version} has no task {task!r}; {hint}")


def _check_installed() -> None:
    if find_spec("reasoning_gym") is None:
        raise ConfigError(
            "reward.functions: reasoning_gym: the package reasoning-gym is missing in this environment; install it: "
            "`launch/setup.sh reasoning-gym` in a clone, else `pip install 'megarl[reasoning-gym]'`"
        )


def metadata_of(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return reasoning-gym's metadata in a record, or None. Raises ValueError if they are not an object."""
    extra = record.get("extra_info")
    objects = [record, extra] if isinstance(extra, Mapping) else [record]
    value = next((candidate["metadata"] for candidate in objects if candidate.get("metadata") is not None), None)
    # Some data sets spread the metadata over extra_info itself.
    if value is None and isinstance(extra, Mapping) and "source_dataset" in extra:
        value = extra
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=make_object)
        except ValueError as error:
            raise ValueError(f"the record's metadata are not valid JSON ({error}): {value!r:.80}") from None
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"the record's metadata are not an object: {value!r:.80}")
    return value


def task_of(record: Mapping[str, Any]) -> str:
    """Return the reasoning-gym task named by a record. Raises ValueError if there is none."""
    metadata = metadata_of(record)
    task = None if metadata is None else metadata.get("source_dataset")
    if not isinstance(task, str):
        raise ValueError(
            "the record has no field metadata.source_dataset with the name of its reasoning-gym task; name the task in "
            "the recipe instead: reasoning_gym.TASK"
        )
    return task


def check_record(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    """Raise ValueError for a record that names no task, for the reward `reasoning_gym`."""
    task_of(record)


def check_metadata(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    """Raise ValueError for a record without reasoning-gym's metadata, for the reward `reasoning_gym.TASK`."""
    if metadata_of(record) is None:
        raise ValueError("the record has no field metadata; reasoning-gym's scorers need it")


def final_answer(text: str, record: Mapping[str, Any], *, place: Place = "tags", **kwargs: Any) -> str | None:
    """Return the final answer of a completion, like the reward, or None. Raises ValueError for an unknown `place`."""
    places: dict[str, Callable[[str], str | None]] = {"tags": last_tagged, "boxed": last_boxed, "text": str}
    if place not in places:
        raise ValueError(f"kwargs.place = {place!r}: is not a valid value; set it to one of {', '.join(places)}")
    answer_text = places[place](final_text(text))
    return None if answer_text is None else answer_text.strip()


def _score_completion(
    task: str,
    completion_text: str,
    answer: Any,
    record: Mapping[str, Any],
    correct_score: float,
    place: Place,
    config: Mapping[str, Any],
) -> Reward:
    """Score the final answer of a completion by the scorer of its task."""
    # Checked first: the trial before a run has no answer, and must report a missing package too.
    _check_installed()
    prediction = final_answer(completion_text, record, place=place)
    raw_score = 0.0
    if prediction is not None and len(prediction) <= _MAX_CHARACTERS:
        metadata = _restore_keys(metadata_of(record) or {})
        if task in _BOARDS and isinstance(metadata.get("output"), list):
            metadata["output"] = tuple(map(tuple, metadata["output"]))
        entry = {
            "question": record.get("question", ""),
            "answer": answer if isinstance(answer, str) else json.dumps(answer),
            "metadata": metadata,
        }
        _refuse_unsafe_record(task, entry)
        dataset = _make_dataset(task, json.dumps(dict(config)))
        raw_score = score_safely(task, dataset, prediction, entry)
    return Reward(
        raw_score * correct_score, prediction is not None, raw_score >= CORRECT_FROM, metrics={"raw": raw_score}
    )


def _refuse_unsafe_record(task: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError if the task's scorer would evaluate unsafe text of a record: records are as untrusted as
    answers.
    """
    metadata = entry["metadata"]
    checks = {
        "number_sorting": (entry["answer"], is_literal),
        "polynomial_multiplication": (entry["answer"], is_formula),
        "simple_integration": (metadata.get("integrand"), is_formula),
        "intermediate_integration": (metadata.get("integrand"), is_formula),
        "bitwise_arithmetic": (metadata.get("problem"), is_integer_arithmetic),
    }
    if task in checks:
        text, is_harmless = checks[task]
        if not is_harmless(str(text)):
            raise ValueError(
                f"reasoning-gym's scorer of {task} would run the record's text {text!r:.80} as Python code, but it is "
                "not a plain formula or literal, so it could be malicious"
            )


@lru_cache(maxsize=128)
def _make_dataset(task: str, config: str) -> Any:
    import reasoning_gym

    check_task(task)
    # The seed does not matter: the dataset is used for its scorer only.
    return reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(config))


def _restore_keys(value: Any) -> Any:
    """Return metadata with whole-number keys: JSON turned them into texts."""
    if isinstance(value, Mapping):
        keys = list(value)
        are_numbers = bool(keys) and all(isinstance(key, str) and key.lstrip("-").isdecimal() for key in keys)
        return {int(key) if are_numbers else key: _restore_keys(inside) for key, inside in value.items()}
    return [_restore_keys(inside) for inside in value] if isinstance(value, list) else value
