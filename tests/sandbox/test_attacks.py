"""Attacks on the sandbox; `tools/check_sandbox.py` has more."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from megarl.sandbox.sandbox import Sandbox
from tests.conftest import load_tool

NAMES = load_tool("check_sandbox").IN_TESTS


@pytest.fixture(scope="module")
def target(tool: Callable[[str], ModuleType]) -> Iterator[Any]:
    with tool("check_sandbox").host() as made:
        yield made


def test_there_are_attacks_enough(tool: Callable[[str], ModuleType]) -> None:
    assert len(NAMES) >= 15 and len(tool("check_sandbox").ATTACKS) >= 55


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_is_contained(sandbox: Sandbox, target: Any, tool: Callable[[str], ModuleType], name: str) -> None:
    _, fault = tool("check_sandbox").attack(sandbox, target, [name])[name]
    assert fault is None


def test_a_breach_would_be_found(sandbox: Sandbox, target: Any, tool: Callable[[str], ModuleType]) -> None:
    check = tool("check_sandbox")
    before = target.state()
    (target.folder / "reward.txt").write_text("1.0")
    assert target.state() != before
    (target.folder / "reward.txt").unlink()
    assert target.state() == before
    with socket.create_connection(("127.0.0.1", target.port)):
        assert target.state()["sockets"] != []
    assert target.state() == before
    assert check.fault_of("TCP connect", sandbox.run("print('BREACH')")) is not None
    assert check.fault_of("infinite loop", sandbox.run("print(1)")) is not None
