"""`megarl sandbox check`, with all layers and on a machine without user namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megarl.sandbox import landlock
from megarl.sandbox.check import Examination
from megarl.sandbox.layers import Layers

WITHOUT_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'


def check(*before: str) -> tuple[int, dict]:
    command = [*before, sys.executable, "-m", "megarl", "sandbox", "check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


def test_this_machine() -> None:
    code, found = check()
    assert (code, found["works"], found["missing"]) == (0, True, {})
    assert found["landlock_version"] >= 1 and f"version is {found['landlock_version']}" in found["notes"][0]
    assert found["layers"] == ["landlock", "limits", "namespaces", "seccomp", "unprivileged"]


def test_operations_that_older_versions_of_landlock_do_not_govern_are_reported() -> None:
    assert landlock.ungoverned_operations(3) == ["TCP", "devices", "signals"]
    assert landlock.ungoverned_operations(6) == []
    found = Examination(Layers(frozenset({"landlock"}), {}), True, "", landlock_version=2)
    [note] = found.notes
    assert "version is 2" in note and "truncating files, TCP, devices, signals" in note


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a place without user namespaces")
def test_a_machine_without_namespaces() -> None:
    """Root is the only user there. It cannot become another user, so no program may run."""
    code, found = check("unshare", "--user", "--map-root-user", "sh", "-c", WITHOUT_NAMESPACES, "sh")
    assert code == 2 and not found["works"]
    assert {"namespaces", "unprivileged"} <= set(found["missing"])
    assert "setresuid" in found["missing"]["unprivileged"]
    assert "start megarl as a user other than root" in found["text"] and "at your own risk" not in found["text"]
