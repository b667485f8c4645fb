"""tools/first_gpu_hour.sh: its steps, their JSON lines, and the archive, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAITS = "def waits(): import time; time.sleep(99)\\nwaits()"
HANGS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{WAITS}'])"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # The environment of the tests, which a clone has in .venv and a matrix of versions elsewhere.
    environment = {**os.environ, "VENV": sys.prefix, **variables}
    command = ["bash", str(ROOT / "tools/first_gpu_hour.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def packed(archive: Path) -> dict[str, str]:
    """Return the files of an archive by their path below its folder."""
    with tarfile.open(archive) as found:
        files = {member.name.partition("/")[2]: found.extractfile(member) for member in found if member.isfile()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


@pytest.mark.long
@pytest.mark.distributed
def test_a_failed_step_does_not_stop_the_next_ones(tmp_path: Path) -> None:
    fails = 'fails=-c \'import tempfile, pathlib; pathlib.Path(tempfile.mkdtemp(), "a.log").write_text("left"); 1 / 0\''
    done = run(
        *("--out", str(tmp_path / "hour"), "--device", "cpu", "--only", "reshard", "fp8"),
        *("--also", fails, "--also", "recipes=-m megarl recipes"),
        NCCL_DEBUG="INFO", MEGARL_SERVE_TOKEN="confidential",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    files = packed(tmp_path / "hour.tar.gz")
    assert files["steps.jsonl"] == done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["step"], line["status"], line.get("exit_code")) for line in lines] == [
        ("reshard", "passed", 0), ("fp8", "left out", None), ("fails", "failed", 1), ("recipes", "passed", 0),
    ]  # fmt: skip
    reshard, fp8, failed, _ = lines
    assert {"checked": "ours"} in reshard["results"]
    assert "repack_seconds" in {result.get("metric") for result in reshard["results"]}
    assert fp8["why"] == "needs an NVIDIA GPU: runs FP8 kernels of the GPU"
    assert "ZeroDivisionError" in failed["why"] and "ZeroDivisionError" in files[failed["log"]]
    assert all(line["machine"]["cores"] > 0 and line["versions"]["torch"] and line["device"] == "cpu" for line in lines)
    assert [text for name, text in files.items() if name.startswith("left_behind/")] == ["left"]
    assert "\nsafetensors==" in files["versions.txt"]
    assert "NCCL_DEBUG=INFO\n" in files["variables.txt"] and "confidential" not in "".join(files.values())
    again = run("--out", str(tmp_path / "hour"), "--only")
    assert again.returncode == 2 and "exists; name a new folder" in again.stderr


@pytest.mark.long
@pytest.mark.distributed
def test_a_step_that_hangs_is_ended_with_the_stacks_of_its_processes(tmp_path: Path) -> None:
    done = run(
        *("--out", str(tmp_path / "hour"), "--device", "cpu", "--only", "--minutes", "0.2"),
        *("--also", f'hangs=-c "{HANGS}"'),
    )
    [line] = [json.loads(text) for text in done.stdout.splitlines()]
    assert done.returncode == 1 and line["status"] == "failed" and "exceeded its limit of 12 s" in line["why"], done
    log = packed(tmp_path / "hour.tar.gz")[line["log"]]
    assert log.count("Fatal Python error: Aborted") == 2 and "in waits" in log and "subprocess.py" in log, log


def test_every_step_has_its_command_on_a_gpu_and_on_a_cpu_or_a_reason(tool: Callable[[str], ModuleType]) -> None:
    hour = tool("first_gpu_hour")
    steps: tuple[Any, ...] = hour.STEPS
    names = [step.name for step in steps]
    assert len(set(names)) == len(names) and names[:2] == ["doctor", "imports"]
    for step in steps:
        assert step.on_gpu and bool(step.on_cpu) != bool(step.needs)
        for command in filter(None, (step.on_gpu, step.on_cpu)):
            assert command[0].startswith("-") or Path(command[0]).is_file()


def test_every_gpu_test_is_in_one_step(tool: Callable[[str], ModuleType]) -> None:
    """A new test that no step chooses is noticed. The steps' expressions are words joined by `or`."""
    tests = re.findall(r"^def (test_\w+)", (ROOT / "tests/gpu/test_gpu.py").read_text(), re.MULTILINE)
    chosen = [step.on_gpu[-1].split(" or ") for step in tool("first_gpu_hour").STEPS if "-k" in step.on_gpu]
    in_steps = {test: sum(any(word in test for word in words) for words in chosen) for test in tests}
    assert in_steps == dict.fromkeys(tests, 1) and len(tests) > 6
