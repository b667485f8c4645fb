"""Whether a recipe's reward functions can be imported and give a reward, tried before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from megarl.config import Recipe
from megarl.config.recipe import error_page
from megarl.data.records import read_records
from megarl.rewards import expected
from megarl.rewards.worker import RewardWorker, WorkerSettings, worker_settings
from megarl.types import ConfigError, PeerLostError


def check_rewards(recipe: Recipe) -> None:
    """Import each reward function in a process of its own and call it once, on the first record's gold answer.

    Raises one ConfigError that lists all functions at fault.
    """
    if not recipe.has_engine:
        return
    path = recipe.data.train if recipe.loop == "rl" else next(iter(recipe.data.validation.values()))
    answer = next(read_records(path)).text(recipe.data.answer_field)
    settings = worker_settings(recipe.reward)
    wrong = [text for name in dict.fromkeys(settings.functions) for text in _try(name, settings, answer)]
    if wrong:
        raise ConfigError(error_page(f"rewards of recipe {recipe.name}", wrong))


def _try(name: str, settings: WorkerSettings, answer: str) -> Iterator[str]:
    """Faults of a function."""
    with TemporaryDirectory(prefix="megarl_rewards_") as folder:
        worker = RewardWorker(replace(settings, functions=(name,)), str(Path(folder) / "output.log"))
        try:
            scored = worker.ask(answer, answer)
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
            f"reward.functions: {name!r} gives no reward for the first record, whose gold answer {answer!r:.60} was "
            f"given as completion too: {scored.detail.strip()}\nMend it; it must be: {expected(name)}"
        )
