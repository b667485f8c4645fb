"""Trials of a recipe's reward functions on its records, before any rank starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.config import Recipe
from megarl.config.recipe import error_page
from megarl.config.sections.data_sets import DataSet, path_of
from megarl.config.sections.rewards import RewardFunctionConfig
from megarl.data.formats import value_at
from megarl.data.kinds.problems import num_made
from megarl.data.reader import read_records
from megarl.data.records import Record
from megarl.datasets.fields import field_names, system_prompt
from megarl.files.import_path import import_object
from megarl.files.private_folder import PrivateFolder
from megarl.rewards import RECORD_CHECKS, kind_of
from megarl.rewards.scoring.calling import Sample, example_definition
from megarl.rewards.scoring.foreign_functions import check_record_field
from megarl.rewards.scoring.reward_process import Scored, WorkerSettings, worker_settings
from megarl.types import ConfigError, PeerLostError

if TYPE_CHECKING:
    from megarl.rewards.scoring.http_rewards import ServedReward
    from megarl.rewards.scoring.reward_pool import RewardPool


def check_rewards(recipe: Recipe, *, is_start: bool = True) -> None:
    """Import each reward function in a separate process, and score the first record with its gold answer as completion.

    Reward servers are called too if `is_start`; otherwise this machine may not reach them. Every record must have the
    fields needed by rewards. Raises one ConfigError: each function with errors, and the first line that it cannot
    score.
    """
    messages: list[str] = []
    for source in recipe.sources if recipe.has_engine else ():
        prefix = f"mixture.{source.name}: " if recipe.mixture else ""
        messages += [f"{prefix}{text}" for text in _find_source_faults(source.recipe, is_start=is_start)]
    if messages:
        raise ConfigError(error_page(f"rewards of recipe {recipe.name}", messages))


def _find_source_faults(recipe: Recipe, *, is_start: bool) -> Iterator[str]:
    """Yield faults of one source's rewards: of records that they cannot judge, and of a trial with the first record."""
    # Imported only if needed: the HTTP client takes longer to import than all other checks together.
    from megarl.rewards.scoring.http_rewards import make_server_client

    server_rewards: list[ServedReward[Any]] = []
    for function in worker_settings(recipe.reward, recipe.sandbox).served:
        try:
            server_rewards.append(make_server_client(function))
        except ConfigError as error:
            yield str(error)
    if not recipe.reward.functions:
        return  # A distillation without rewards measures nothing, so records need no answer.
    data_set = recipe.data.train if recipe.is_on_policy else next(iter(recipe.data.validation.values()))
    if num_made(path_of(data_set)) is not None:
        return  # An environment makes the data, so there is no record to test with.
    record_faults = list(_find_record_faults(recipe, _make_checks(recipe, server_rewards)))
    yield from record_faults
    # A faulty record would make the trial below fail for a reason already reported.
    if record_faults:
        return
    record = next(read_records(path_of(data_set), field_names(recipe, data_set)))
    answer = record.answer()
    completion = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    sample = Sample(completion, answer, record.prompt(system_prompt(recipe)), record.fields, num_tokens=1)
    settings = worker_settings(recipe.reward, recipe.sandbox)
    for function in settings.functions:
        yield from _try_function(recipe, function, settings, sample)
    for server in server_rewards if is_start else ():
        yield from _try_server(server, sample)


Check = Callable[[Record], None]
"""Check of one record. Raises ValueError if a reward function cannot score it."""


def _find_record_faults(recipe: Recipe, checks: Mapping[str, Check]) -> Iterator[str]:
    """Yield an error for each reward function that cannot score a record; it names the first such record.

    `checks` has a check of records for each reward function, by name.
    """
    # A function is removed after its first faulty record.
    pending_checks = dict(checks)
    training_sets: list[DataSet] = [recipe.data.train] if recipe.is_on_policy else []
    for data_set in [*training_sets, *recipe.data.validation.values()]:
        path = path_of(data_set)
        if not pending_checks or num_made(path) is not None:
            continue
        for record in read_records(path, field_names(recipe, data_set)):
            for name, check in list(pending_checks.items()):
                try:
                    check(record)
                except ValueError as error:
                    del pending_checks[name]
                    yield (
                        f"{record.error(f'reward.functions: {name!r} cannot score this record: {error}')}; correct "
                        "or remove it, or change the reward"
                    )
            # Every function has its first faulty record, so stop reading.
            if not pending_checks:
                break


def _make_checks(recipe: Recipe, served: list[ServedReward[Any]]) -> dict[str, Check]:
    """Return the checks of records by reward function, without functions that need no check."""
    checks_by_name: dict[str, Check] = {}
    servers = {reward.name: reward for reward in served}
    for function in recipe.reward.functions:
        path = RECORD_CHECKS.get(kind_of(function.name))
        record_check = None if path is None else import_object(path, "reward.functions")
        server = servers.get(function.name)
        server = server if server is not None and server.reads_records else None
        if record_check is None and server is None and not function.needs:
            continue
        checks_by_name[function.name] = _make_check(function, record_check, server)
    return checks_by_name


def _make_check(
    function: RewardFunctionConfig, record_check: Callable[..., Any] | None, server: ServedReward[Any] | None
) -> Check:
    """Return the check of a record for one reward function. It raises ValueError."""

    def check_record(record: Record) -> None:
        for name in function.needs:
            if value_at(record.fields, name) is None:
                raise ValueError(
                    f"the record has no field {name!r}, listed in `needs` of the reward function; add it to the "
                    "record, or remove it from `needs`"
                )
        if record_check is not None:
            record_check(record.answer(), record.fields, **function.kwargs)
        if server is not None:
            server.check_record(Sample("", record.answer(), (), record.fields))

    return check_record


async def _check_and_score(
    recipe: Recipe, function: RewardFunctionConfig, pool: RewardPool, sample: Sample
) -> tuple[list[str], Scored | None]:
    """Return errors if a record lacks a field that the function needs, else the sample's score."""
    fields = await pool.record_fields()
    # Without fields, skip reading the records again.
    record_faults = list(_find_record_faults(recipe, {function.name: _make_field_check(fields)})) if fields else []
    return record_faults, None if record_faults else await pool.score(sample)


def _make_field_check(fields: Sequence[str]) -> Check:
    def check_fields(record: Record) -> None:
        for name in fields:
            check_record_field(name, record.fields)

    return check_fields


def _try_server(served: ServedReward[Any], sample: Sample) -> Iterator[str]:
    """Call a reward server once. Yield an error if the call fails or the answer has no readable score."""
    from megarl.rewards.scoring.http_rewards import ServerFailedError

    # parse_error_score replaces unreadable answers during a run. This check must report them.
    served.config = served.config.model_copy(update={"parse_error_score": None})

    async def score_once() -> None:
        try:
            await served.score(sample)
        finally:
            await served.aclose()

    try:
        asyncio.run(score_once())
    except ServerFailedError as error:
        yield (
            f"reward.functions: {served.name!r} gives no score for the first record, although its gold answer "
            f"{str(sample.answer)!r:.60} was passed as completion too: {error}; start the server, or correct the kwargs"
        )


def _try_function(
    recipe: Recipe, function: RewardFunctionConfig, settings: WorkerSettings, sample: Sample
) -> Iterator[str]:
    """Call one reward function in a separate process, and yield its errors."""
    # Imported here, because it loads the HTTP client.
    from megarl.rewards.scoring.reward_pool import RewardPool

    with PrivateFolder() as folder:
        pool = RewardPool(replace(settings, functions=(function,), served=()), num_workers=1, log_folder=folder)
        try:
            record_faults, scored = asyncio.run(_check_and_score(recipe, function, pool, sample))
        except ConfigError as error:
            yield str(error)
            return
        except PeerLostError as error:
            yield f"reward.functions: {error}"
            return
        finally:
            pool.close()
    yield from record_faults
    if scored is not None and scored.failure:
        yield (
            f"reward.functions: {function.name!r} gives no reward for the first record, although its gold answer "
            f"{str(sample.answer)!r:.60} was passed as completion too: {scored.detail.strip()} Correct it; for "
            f"example: {example_definition(function.name)}"
        )
