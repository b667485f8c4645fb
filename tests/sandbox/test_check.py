"""`megarl sandbox check`, here and where a machine lets nobody make namespaces."""

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


def test_what_older_versions_of_landlock_lack_is_told() -> None:
    assert landlock.lacks(3) == ["TCP", "devices", "signals"]
    assert landlock.lacks(6) == []
    found = Examination(Layers(frozenset({"landlock"}), {}), True, "", landlock_version=2)
    [note] = found.notes
    assert "version is 2" in note and "truncating files, TCP, devices, signals" in note


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a place without user namespaces")
def test_a_machine_without_namespaces() -> None:
    """There root is the only user, too: it can become no other, so that nothing may run."""
    code, found = check("unshare", "--user", "--map-root-user", "sh", "-c", WITHOUT_NAMESPACES, "sh")
    assert code == 2 and not found["works"]
    assert {"namespaces", "unprivileged"} <= set(found["missing"])
    assert "setresuid" in found["missing"]["unprivileged"]
    assert "start megarl as a user other than root" in found["text"] and "at your own risk" not in found["text"]
