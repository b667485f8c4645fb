"""Attacks on the sandbox; `tools/check.py sandbox` has more."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.sandbox.sandbox import Sandbox
from tools.checks.sandbox import ATTACKS, IN_TESTS, attack, host


@pytest.fixture(scope="module")
def target() -> Iterator[Any]:
    with host() as made:
        yield made


def test_there_are_attacks_enough() -> None:
    assert len(IN_TESTS) >= 15 and len(ATTACKS) >= 55


@pytest.mark.parametrize("name", IN_TESTS)
def test_an_attack_is_contained(sandbox: Sandbox, target: Any, name: str) -> None:
    _, fault = attack(sandbox, target, [name])[name]
    assert fault is None


def filtered(program: str) -> str:
    """What a program of this user prints that only the filter of system calls holds."""
    begin = "import sys\nfrom megarl.sandbox import seccomp\nseccomp.apply_filter(is_isolated=False)\nexec(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", begin, program], capture_output=True, text=True).stdout


def test_the_filter_alone_protects_other_processes(target: Any) -> None:
    from tools.checks import sandbox as check

    before = target.state()
    assert [filtered(target.program(check.ATTACKS[name])) for name in check.BY_CALLS_ALONE] == [""] * 4
    assert target.state() == before
    assert "BREACH" in filtered("print('BREACH')")


CHANGES = """
import os
for change in ("os.chmod('/none/x', 0)", "os.utime('/none/x', (0, 0))", "os.truncate('/none/x', 0)"):
    try: eval(change)
    except OSError as error: print(type(error).__name__)
"""


def test_files_are_changed_only_where_they_are_its_own(sandbox: Sandbox) -> None:
    assert filtered(CHANGES).split() == ["PermissionError"] * 3
    assert sandbox.run(CHANGES).stdout.split() == ["FileNotFoundError"] * 3


def test_a_breach_would_be_found(sandbox: Sandbox, target: Any) -> None:
    from tools.checks import sandbox as check

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
