"""launch/test.sh, with programs in its tools' place, and the tiers of the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl.platform.memory.host_memory import machine_bytes
from tests.conftest import TIERS

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "tests/probes/tiers.py"
WORKERS = f"-n {6 if machine_bytes() >= 20 << 30 else 4} --dist loadfile --no-loadscope-reorder"
CALLED = """#!/bin/bash
echo "$(basename "$0") $*" >> "$LOG"
[ "$(basename "$0")" != id ] || echo 0
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout's launch/test.sh on a machine without Slurm, with programs that note their arguments."""
    for path in (
        "launch/setup.sh",
        *(f".venv/bin/{name}" for name in ("ruff", "lint-imports", "pytest")),
        *(f"bin/{name}" for name in ("apt-get", "id")),
    ):
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(CALLED)
        program.chmod(0o755)
    # The script asks the package for the memory limit.
    python = tmp_path / ".venv/bin/python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for name in ("bash", "basename", "dirname", "timeout"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    shutil.copy(ROOT / "launch/test.sh", tmp_path / "launch/test.sh")
    return tmp_path


def run(checkout: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    environment = {"PATH": str(checkout / "bin"), "LOG": str(checkout / "log")}
    command = [str(checkout / "launch/test.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    log = checkout / "log"
    return done, log.read_text().splitlines() if log.exists() else []


def test_nothing_of_the_system_is_installed_unasked(checkout: Path) -> None:
    done, called = run(checkout, "tests/data", "-x")
    assert done.returncode == 0, done.stderr
    assert called == [
        "setup.sh dev",
        "ruff check .",
        "ruff format --check .",
        "lint-imports ",
        f"pytest {WORKERS} tests/data -x",
    ]
    [message] = done.stdout.splitlines()
    assert "the tests marked slurm are left out" in message and "--install-slurm" in message


def test_slurm_is_installed_where_that_is_asked_for(checkout: Path) -> None:
    done, called = run(checkout, "--tier", "fast", "--install-slurm", "-k", "a or b")
    assert done.returncode == 0, done.stderr
    install = next(line for line in called if line.startswith("apt-get install"))
    assert "slurm-wlm munge" in install and called[-1] == f"pytest {WORKERS} -m fast -k a or b"


def test_the_matrix_is_a_program_of_its_own(checkout: Path) -> None:
    python = checkout / "bin/python3"
    python.write_text(CALLED)
    python.chmod(0o755)
    done, called = run(checkout, "--matrix", "--set", "next")
    assert done.returncode == 0, done.stderr
    assert called == ["python3 tools/matrix.py --set next"]


@pytest.mark.parametrize("arguments", [["--tier", "quick"], ["--tier=quick"], ["-x", "--tier"], ["--tier="]])
def test_an_unknown_tier_is_told_before_anything_starts(checkout: Path, arguments: list[str]) -> None:
    done, called = run(checkout, *arguments)
    assert (done.returncode, called) == (2, [])
    assert all(tier in done.stderr for tier in ("all", *TIERS, "long")) and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("tier", [*TIERS, "long"])
def test_every_tier_is_one_of_the_script_s(checkout: Path, tier: str) -> None:
    assert run(checkout, f"--tier={tier}")[1][-1] == f"pytest {WORKERS} -m {tier}"


def run_probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PROBE), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTEST_ADDOPTS": ""})


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("marker", "names"),
    [
        ("fast", ["test_has_neither", "test_starts_ranks_without_a_marker"]),
        ("distributed", ["test_uses_ranks"]),
        ("end_to_end", ["test_is_marked"]),
        ("cluster and slurm", ["test_needs_slurm"]),
        ("long", ["test_takes_minutes"]),
    ],
)
def test_a_tier_is_a_marker_of_the_test_or_declared_by_its_fixtures(marker: str, names: list[str]) -> None:
    done = run_probe("--collect-only", "-m", marker)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line] == names


@pytest.mark.end_to_end
def test_the_fast_tier_starts_no_ranks() -> None:
    done = run_probe("-m", "fast")
    assert done.returncode == 1 and "a test of the fast tier starts ranks: mark it as" in done.stdout, done.stdout
    assert "1 failed, 1 passed, 4 deselected" in done.stdout, done.stdout


@pytest.mark.end_to_end
def test_the_last_lines_say_how_slurm_is_installed() -> None:
    done = run_probe("-m", "cluster")
    assert done.returncode == 0, done.stdout + done.stderr
    *_, reason, remedy, closing = done.stdout.splitlines()
    assert reason == "1 test: needs Slurm and munge"
    assert remedy.startswith("for those marked slurm: launch/test.sh --install-slurm")
    assert closing.startswith("1 skipped, 5 deselected in")


def test_every_test_is_of_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert len([tier for tier in TIERS if item.get_closest_marker(tier)]) == 1, item.nodeid


def test_ci_calls_the_test_command_of_the_readme() -> None:
    assert "run: launch/test.sh --install-slurm\n" in (ROOT / ".github/workflows/ci.yml").read_text()
    assert (ROOT / ".ci/run").read_text().endswith('/../launch/test.sh" --install-slurm\n')


def test_the_cuda_environments_are_checked_once_a_week() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/gpu_environment.yml").read_text())
    # YAML 1.1 reads the key `on` as true.
    [schedule] = workflow[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", schedule["cron"])
    job = workflow["jobs"]["guards"]
    assert job["strategy"]["matrix"]["versions"] == ["stable", "next"]
    assert job["env"]["VERSIONS"] == "${{ matrix.versions }}"
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-3:] == [
        "launch/setup.sh dev", ".venv/bin/pytest -m gpu_environment tests/guards", "launch/test.sh --cuda",
    ]  # fmt: skip


def test_actions_of_all_workflows_are_pinned_to_commits() -> None:
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    lines = [line for file in files for line in file.read_text().splitlines() if "uses:" in line]
    assert len(lines) >= 3 and all(re.search(r"@[0-9a-f]{40} # v", line) for line in lines)
