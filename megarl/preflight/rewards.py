"""Whether a recipe's reward functions can be imported and give a reward, tried before any rank starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from megarl.config import Recipe, RewardFunctionConfig
from megarl.config.recipe import error_page
from megarl.data.problems import num_made
from megarl.data.records import read_records
from megarl.preflight.files import field_names, system_prompt
from megarl.rewards.calling import Sample, expected
from megarl.rewards.worker import RewardWorker, WorkerSettings, worker_settings
from megarl.types import ConfigError, PeerLostError


def check_rewards(recipe: Recipe) -> None:
    """Import each reward function in a process of its own and call it once, its completion the first record's answer.

    Raises one ConfigError that lists all functions at fault.
    """
    wrong: list[str] = []
    for source in recipe.sources if recipe.has_engine else ():
        before = f"mixture.{source.name}: " if recipe.mixture else ""
        wrong += [f"{before}{text}" for text in _faults_of_source(source.recipe)]
    if wrong:
        raise ConfigError(error_page(f"rewards of recipe {recipe.name}", wrong))


def _faults_of_source(recipe: Recipe) -> Iterator[str]:
    path = recipe.data.train if recipe.loop == "rl" else next(iter(recipe.data.validation.values()))
    if num_made(path) is not None:
        return  # there is no record to try them on
    record = next(read_records(path, field_names(recipe)))
    answer = record.answer()
    said = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    sample = Sample(said, answer, record.prompt(system_prompt(recipe)), record.fields, num_tokens=1)
    settings = worker_settings(recipe.reward, recipe.sandbox)
    for function in settings.functions:
        yield from _try(function, settings, sample)


def _try(function: RewardFunctionConfig, settings: WorkerSettings, sample: Sample) -> Iterator[str]:
    """Faults of a function."""
    with TemporaryDirectory(prefix="megarl_rewards_") as folder:
        worker = RewardWorker(replace(settings, functions=(function,)), str(Path(folder) / "output.log"))
        try:
            scored = worker.ask(sample)
        except ConfigError as error:
            yield str(error)
            return
        except PeerLostError as error:
            yield f"reward.functions: {error}"
            return
        finally:
            worker.close()
    if scored.failure:
        yield (
            f"reward.functions: {function.name!r} gives no reward for the first record, whose gold answer "
            f"{str(sample.answer)!r:.60} was given as completion too: {scored.detail.strip()}\n"
            f"Mend it; for example: {expected(function.name)}"
        )
