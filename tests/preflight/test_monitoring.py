"""A port in use is refused with the recipe's other errors, before anything starts."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator

import pytest

from megarl.config import Recipe
from megarl.preflight import check


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_in_use_is_refused(
    recipe: Callable[..., Recipe], only_fault: Callable[..., str], taken_port: int
) -> None:
    text = only_fault(monitor={"port": taken_port})
    assert text.startswith(f"monitor.port = {taken_port}: cannot listen on 127.0.0.1, port {taken_port} (Address")
    assert text.endswith("give another port, 0 takes any that is free")
    # A machine that only plans does not listen. An evaluation has no monitor.
    check(recipe(monitor={"port": taken_port}), is_start=False)
    check(recipe(monitor={"port": taken_port}), is_trained=False)
    check(recipe(monitor={"port": 0}))


def test_an_endpoint_needs_a_port_of_its_own(only_fault: Callable[..., str], taken_port: int) -> None:
    agent = {"environment": "command", "agent": {"command": [sys.executable, "-c", "print(1)"]}}
    text = only_fault(rollout={**agent, "endpoint": {"port": taken_port}})
    assert text.startswith(f"rollout.endpoint.port = {taken_port}: cannot listen")
    text = only_fault(rollout={**agent, "endpoint": {"port": 9}}, monitor={"port": 9, "host": "localhost"})
    assert text.startswith("rollout.endpoint.port = 9: monitor.port is the same")
