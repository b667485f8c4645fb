"""Tasks in Harbor's format as a data source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.data.reader import read_records
from megarl.data.sources.harbor import task_image
from megarl.types import DataError


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., Path]:
    """`task(name, toml)` writes a task, and returns its folder."""

    def make(name: str, toml: str = "") -> Path:
        folder = tmp_path / name
        (folder / "tests").mkdir(parents=True)
        (folder / "environment").mkdir()
        (folder / "task.toml").write_text(toml)
        (folder / "instruction.md").write_text(f"Do {name}.\n")
        (folder / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        # A task may have files of any kind, which are no data.
        (folder / "tests/cases.jsonl").write_text("{}\n")
        return folder

    return make


def test_a_folder_of_tasks_is_a_data_set(task: Callable[..., Path], tmp_path: Path) -> None:
    settings = '[agent]\ntimeout_sec = 9\nuser = "root"\n[verifier]\ntimeout_sec = 5.5\n'
    settings += '[environment]\nworkdir = "/app"\ncpus = 2\nmemory_mb = 64\nstorage_mb = 1.5\n'
    task("second", settings)
    task("first")
    first, second = read_records(tmp_path)
    assert [message["content"] for message in first.prompt(None)] == ["Do first.\n"]
    assert first.answer() == "first" and first.fields["harbor"]["verifier_seconds"] == 600.0
    fields = second.fields["harbor"]
    assert (fields["agent_seconds"], fields["verifier_seconds"], fields["workdir"]) == (9.0, 5.5, "/app")
    assert (fields["cpus"], fields["memory_bytes"], fields["storage_bytes"]) == (2.0, 64 << 20, 3 << 19)
    assert first.fields["harbor"]["memory_bytes"] is None
    assert fields["folder"] == str(tmp_path / "second")
    # One task is a source too.
    assert len(list(read_records(tmp_path / "first"))) == 1
    assert task_image(fields, "/images/{task}", is_file=True) == "/images/second"
    assert task_image({**fields, "image": "debian"}, None, is_file=True) is None
    assert task_image({**fields, "image": "debian"}, None, is_file=False) == "debian"


@pytest.mark.parametrize(
    ("file", "text", "facts"),
    [
        ("tests/test.sh", None, "tests/test.sh"),
        ("instruction.md", None, "instruction.md"),
        ("instruction.md", " \n", "instruction.md"),
        ("task.toml", "[agent", "TOML"),
        ("task.toml", "agent = 3", "agent = 3"),
        ("task.toml", "[agent]\ntimeout_sec = -1", "timeout_sec = -1"),
        ("task.toml", "[verifier]\ntimeout_sec = inf", "timeout_sec = inf"),
        ("task.toml", '[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode = 'separate'"),
        ("task.toml", '[environment]\nnetwork_mode = "allowlist"', "environment.network_mode = allowlist"),
        ("task.toml", "[environment]\nworkdir = 3", "environment.workdir = 3"),
        ("task.toml", "[environment]\ncpus = true", "cpus = True"),
        ("task.toml", "[environment]\nmemory_mb = 0", "memory_mb = 0"),
        ("task.toml", '[environment]\nmemory = "2G"', "environment.memory = '2G': is not supported; write memory_mb"),
        ("task.toml", "[environment]\ngpus = 1", "environment.gpus = 1"),
        ("task.toml", '[agent]\nuser = "nobody"', "agent.user = 'nobody'"),
        ("task.toml", '[verifier.env]\nKEY = "1"', "verifier.env = {'KEY': '1'}"),
        ("task.toml", '[environment.healthcheck]\ncommand = "x"', "environment.healthcheck"),
        ("environment/docker-compose.yaml", "", "environment/docker-compose.yaml"),
    ],
)
def test_a_task_that_cannot_be_graded_is_refused(
    task: Callable[..., Path], tmp_path: Path, file: str, text: str | None, facts: str
) -> None:
    place = task("wrong") / file
    place.unlink(missing_ok=True)
    if text is not None:
        place.write_text(text)
    with pytest.raises(DataError) as error:
        list(read_records(tmp_path))
    assert facts in str(error.value) and str(tmp_path / "wrong/task.toml") in str(error.value)
