"""launch/test.sh, with programs in its tools' place, and the tiers of the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "tests/probes/without_slurm.py"
WORKERS = "-n 3 --dist loadfile --no-loadscope-reorder"
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
        f"pytest {WORKERS} --tier all tests/data -x",
    ]
    [told] = done.stdout.splitlines()
    assert "the tests marked slurm are left out" in told and "--install-slurm" in told


def test_slurm_is_installed_where_that_is_asked_for(checkout: Path) -> None:
    done, called = run(checkout, "--tier", "fast", "--install-slurm", "-k", "a or b")
    assert done.returncode == 0, done.stderr
    install = next(line for line in called if line.startswith("apt-get install"))
    assert "slurm-wlm munge" in install and called[-1] == f"pytest {WORKERS} --tier fast -k a or b"


@pytest.mark.parametrize("arguments", [["--tier", "quick"], ["--tier=quick"], ["-x", "--tier"], ["--tier="]])
def test_an_unknown_tier_is_told_before_anything_starts(checkout: Path, arguments: list[str]) -> None:
    done, called = run(checkout, *arguments)
    assert (done.returncode, called) == (2, [])
    assert all(tier in done.stderr for tier in ("all", *tiers.TIERS)) and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_every_tier_is_one_of_the_script_s(checkout: Path, tier: str) -> None:
    assert run(checkout, f"--tier={tier}")[1][-1] == f"pytest {WORKERS} --tier {tier}"


def pytest_of_the_probe(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PROBE), *arguments]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--tier=fast"], ["test_of_nothing"]),
        (["--tier=distributed"], ["test_of_ranks"]),
        (["-m", "end_to_end"], ["test_that_says_so"]),
        (["-m", "cluster and slurm"], ["test_of_slurm"]),
    ],
)
def test_a_tier_is_known_by_what_a_test_uses(arguments: list[str], names: list[str]) -> None:
    lines = pytest_of_the_probe("--collect-only", *arguments)
    assert [line.rpartition("::")[2] for line in lines if "::" in line] == names


def test_the_last_lines_say_how_slurm_is_installed() -> None:
    *_, reason, remedy, closing = pytest_of_the_probe("--tier=cluster")
    assert reason == "1 test: needs Slurm and munge"
    assert remedy.startswith("for those marked slurm: launch/test.sh --install-slurm")
    assert closing.startswith("1 skipped, 3 deselected in")


def test_every_test_is_of_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert len([tier for tier in tiers.TIERS if item.get_closest_marker(tier)]) == 1, item.nodeid


def test_a_folder_that_is_left_out_has_no_tests_of_another_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        tier = tiers.FOLDERS.get(tiers.folder_of(item))
        assert tier is None or item.get_closest_marker(tier) is not None, item.nodeid


def test_the_tables_name_what_there_is() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    assert tiers.FILES.keys() <= {path.name for path in files}
    defined = {name for path in files for name in re.findall(r"^ *def (\w+)\(", path.read_text(), re.MULTILINE)}
    assert {*tiers.TESTS, *tiers.FIXTURES} <= defined
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert tiers.FOLDERS.keys() <= folders


def test_ci_calls_the_test_command_of_the_readme() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "run: launch/test.sh --install-slurm\n" in workflow
    assert all(re.search(r"@[0-9a-f]{40} # v", line) for line in workflow.splitlines() if "uses:" in line)
    assert (ROOT / ".ci/run").read_text().endswith('/../launch/test.sh" --install-slurm\n')
