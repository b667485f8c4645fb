"""Checks of addresses on which the driver listens."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.environments import is_agent
from megarl.preflight.registry import Cost, checks
from megarl.processes.listening import listen_fault, taken_text


@checks("monitor", Cost.FILES, per_run=True, training_only=True)
def check_monitor_port(recipe: Recipe, *, is_start: bool) -> Iterator[str]:
    host, port = recipe.monitor.host, recipe.monitor.port
    if port and is_start and (fault := listen_fault(host, port)) is not None:
        yield f"monitor.port = {port}: {taken_text(host, port, fault)}"


@checks("rollout", Cost.FILES)
def check_endpoint_port(recipe: Recipe, *, is_start: bool) -> Iterator[str]:
    """Yield an error if the port of the agents' endpoint is in use."""
    if not (recipe.has_engine and is_agent(recipe.rollout.environment)):
        return
    host, port = recipe.rollout.endpoint.host, recipe.rollout.endpoint.port
    if port and port == recipe.monitor.port:
        yield f"rollout.endpoint.port = {port}: monitor.port is the same; give another port, 0 takes any that is free"
    elif port and is_start and (fault := listen_fault(host, port)) is not None:
        yield f"rollout.endpoint.port = {port}: {taken_text(host, port, fault)}"
