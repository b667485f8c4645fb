"""The environment of a recipe, created once before a run to read its tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megarl.config import Recipe
from megarl.data.tools.schemas import ToolSchema
from megarl.environments import Environment, environment_maker, num_processes, with_sandbox
from megarl.types import ConfigError, MegarlError


def environment_factory(recipe: Recipe) -> Callable[[], Environment]:
    rollout = recipe.rollout
    settings = with_sandbox(rollout.environment, rollout.environment_kwargs, recipe.sandbox.model_dump(mode="json"))
    make = environment_maker(rollout.environment, settings)
    # Called for its check only: the value must fit the environment.
    num_processes(rollout.environment, rollout.environment_processes)
    return make


@contextmanager
def environment_errors(recipe: Recipe) -> Iterator[None]:
    """Turn any error of the environment within this context into a ConfigError about `rollout.environment_kwargs`."""
    rollout = recipe.rollout
    try:
        yield
    except MegarlError as error:
        raise ConfigError(f"rollout.environment_kwargs: {rollout.environment}: {error}") from error
    except Exception as error:  # The class may be a user's code and raise anything.
        raise ConfigError(
            f"rollout.environment_kwargs = {rollout.environment_kwargs}: {rollout.environment} raises "
            f"{type(error).__name__}: {error}"
        ) from error


def tools_of_environment(recipe: Recipe) -> Sequence[ToolSchema]:
    """Return the environment's tools; empty for agent programs. Raises ConfigError."""
    if recipe.rollout.environment == "command":
        return ()
    make = environment_factory(recipe)
    with environment_errors(recipe):
        return tuple(getattr(make(), "tools", ()))
