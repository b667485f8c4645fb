"""`megarl sandbox check`, here and where a machine lets nobody make namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

WITHOUT_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'


def check(*before: str) -> tuple[int, dict]:
    command = [*before, sys.executable, "-m", "megarl", "sandbox", "check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


def test_this_machine() -> None:
    code, found = check()
    assert (code, found["works"], found["missing"]) == (0, True, {})
    assert found["layers"] == ["landlock", "limits", "namespaces", "seccomp", "unprivileged"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a place without user namespaces")
def test_a_machine_without_namespaces() -> None:
    """There root is the only user, too: it can become no other, so that nothing may run."""
    code, found = check("unshare", "--user", "--map-root-user", "sh", "-c", WITHOUT_NAMESPACES, "sh")
    assert code == 2 and not found["works"]
    assert {"namespaces", "unprivileged"} <= set(found["missing"])
    assert "setresuid" in found["missing"]["unprivileged"]
    assert "start megarl as a user other than root" in found["text"] and "at your own risk" not in found["text"]
