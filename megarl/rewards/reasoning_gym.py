"""Scorers of reasoning-gym for its own records: `reasoning_gym.TASK`, or each record's own task.

The attribute of this module named after a task is the task's reward function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

from megarl.files.nearest import nearest
from megarl.rewards.final_answers import last_boxed, last_tagged
from megarl.rewards.harmless import harmless_answer, is_formula, is_integer_arithmetic, is_literal
from megarl.types import ConfigError, Reward

Place = Literal["tags", "boxed", "text"]

# Scores are sums of floats, so a perfect one may be slightly below 1.
_CORRECT_FROM = 0.99
_MAX_CHARACTERS = 20_000
"""Longer answers score zero: the time of some scorers grows with a power of the length."""

_BOARDS = ("arc_agi", "rearc")
"""Tasks with scorers comparing tuples, stored by JSON as lists."""
_NO_GOLD = ("null", "", "None")


def reasoning_gym(
    completion_text: str,
    answer: Any,
    record: Mapping[str, Any],
    *,
    correct_score: float = 1.0,
    place: Place = "tags",
) -> Reward:
    """Score the answer by the task in `metadata.source_dataset` of the record.

    Everything else is as in `scorer_of`. Metric: the mean score under the task's own name.
    """
    task = task_of(record)
    scored = _score(task, completion_text, answer, record, correct_score, place, {})
    return Reward(
        scored.score,
        scored.format_valid,
        scored.answer_correct,
        metrics={task: scored.metrics["raw"], **scored.metrics},
    )


def scorer_of(task: str) -> Callable[..., Reward]:
    """Return the reward function of a task.

    It scores the last <answer> tags, the last \\boxed{} or all of the completion (`place`) by the task's own scorer,
    multiplied by `correct_score`. The answer is correct from 0.99. The record needs reasoning-gym's `metadata`, an
    object or its JSON, at the top or in `extra_info`. `config` has the task's settings, for scorers depending on them.
    If a scorer evaluates the answer, one that is neither literal nor formula counts as empty (`harmless`). Metric:
    `raw`, the scorer's own value.
    """

    def score(
        completion_text: str,
        answer: Any,
        record: Mapping[str, Any],
        *,
        correct_score: float = 1.0,
        place: Place = "tags",
        config: Mapping[str, Any] | None = None,
    ) -> Reward:
        return _score(task, completion_text, answer, record, correct_score, place, config or {})

    return score


def __getattr__(name: str) -> Callable[..., Reward]:
    # Python asks for private names (such as __path__) too; they are not tasks.
    if name.startswith("_"):
        raise AttributeError(name)
    check_task(name)
    return scorer_of(name)


def check_task(task: str) -> None:
    """Raise ConfigError for a task unknown to reasoning-gym."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task == "composite":
        raise ConfigError(
            "reward.functions: 'reasoning_gym.composite': is made of several tasks; name reasoning_gym, using the "
            "task of each record"
        )
    if task in DATASETS:
        return
    near = nearest(task, DATASETS)
    hint = f"did you mean reasoning_gym.{near}?" if near else f"it has {', '.join(sorted(DATASETS))}"
    version = reasoning_gym.__version__
    raise ConfigError(f"reward.functions: 'reasoning_gym.{task}': reasoning-gym {version} has no task {task!r}; {hint}")


def metadata_of(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return reasoning-gym's metadata of a record. None: it has none. Raises ValueError if they are not an object."""
    extra = record.get("extra_info")
    places = [record, extra] if isinstance(extra, Mapping) else [record]
    value = next((place["metadata"] for place in places if place.get("metadata") is not None), None)
    # Some data sets spread the metadata over extra_info itself.
    if value is None and isinstance(extra, Mapping) and "source_dataset" in extra:
        value = extra
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"its metadata are {value!r:.80}, not JSON") from None
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"its metadata are {value!r:.80}, not an object")
    return value


def task_of(record: Mapping[str, Any]) -> str:
    """Return the task of a record. Raises ValueError if it names none."""
    metadata = metadata_of(record)
    task = None if metadata is None else metadata.get("source_dataset")
    if not isinstance(task, str):
        raise ValueError(
            "the record has no metadata.source_dataset, reasoning-gym's name of its task; name the task in the recipe: "
            "reasoning_gym.TASK"
        )
    return task


def check_record(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    """Raise ValueError for a record without the name of its task (`reasoning_gym`)."""
    task_of(record)


def check_metadata(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    """Raise ValueError for a record without reasoning-gym's metadata (`reasoning_gym.TASK`)."""
    if metadata_of(record) is None:
        raise ValueError("the record has no metadata, needed by reasoning-gym's scorers")


def final_answer(text: str, record: Mapping[str, Any], *, place: Place = "tags", **kwargs: Any) -> str | None:
    """Return the scored answer. None: the completion states none. Raises ValueError for an unknown place."""
    places: dict[str, Callable[[str], str | None]] = {"tags": last_tagged, "boxed": last_boxed, "text": str}
    if place not in places:
        raise ValueError(f"place is {place!r}; give one of {', '.join(places)}")
    found = places[place](text)
    return None if found is None else found.strip()


def _score(
    task: str,
    completion_text: str,
    answer: Any,
    record: Mapping[str, Any],
    correct_score: float,
    place: Place,
    config: Mapping[str, Any],
) -> Reward:
    said = final_answer(completion_text, record, place=place)
    raw = 0.0
    if said is not None and len(said) <= _MAX_CHARACTERS:
        metadata = _as_made(metadata_of(record) or {})
        if task in _BOARDS and isinstance(metadata.get("output"), list):
            metadata["output"] = tuple(map(tuple, metadata["output"]))
        entry = {
            "question": record.get("question", ""),
            "answer": answer if isinstance(answer, str) else json.dumps(answer),
            "metadata": metadata,
        }
        _refuse_evaluated(task, entry)
        raw = _raw(task, _dataset(task, json.dumps(dict(config))), harmless_answer(task, said, entry), entry)
    return Reward(raw * correct_score, said is not None, raw >= _CORRECT_FROM, metrics={"raw": raw})


def _raw(task: str, dataset: Any, said: str, entry: Mapping[str, Any]) -> float:
    """Return the scorer's value, or 0 if it raises on the answer but not on the gold one."""
    if task == "game_of_life_halting":
        # Its scorer evaluates any text as True.
        return float(said.casefold() == entry["answer"].casefold())
    try:
        return float(dataset.score_answer(said, entry))
    except Exception:
        if entry["answer"] not in _NO_GOLD:
            dataset.score_answer(entry["answer"], entry)  # Raises if the record is faulty.
        return 0.0


def _refuse_evaluated(task: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError if a scorer would evaluate unsafe text from a record.

    Data come from outside, like answers, so they are checked as well.
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
            raise ValueError(f"{task} would evaluate {text!r:.80} of the record as Python, but it is not a formula")


@lru_cache(maxsize=128)
def _dataset(task: str, config: str) -> Any:
    import reasoning_gym

    check_task(task)
    # The seed does not matter: the dataset is used for its scorer only.
    return reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(config))


def _as_made(value: Any) -> Any:
    """Return metadata with whole numbers as keys, stored by JSON as texts."""
    if isinstance(value, Mapping):
        keys = list(value)
        are_numbers = bool(keys) and all(isinstance(key, str) and key.lstrip("-").isdecimal() for key in keys)
        return {int(key) if are_numbers else key: _as_made(inside) for key, inside in value.items()}
    return [_as_made(inside) for inside in value] if isinstance(value, list) else value
