from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.config.recipe import load, to_yaml
from megarl.tracking.run_folder import RunFolder
from megarl.types import ConfigError, DataError, MegarlError, PeerLostError, RunFolderLockedError, StorageError

OWNER = """
import sys
from megarl.config import Recipe
from megarl.tracking.run_folder import RunFolder
folder = RunFolder(Recipe.model_validate_json(sys.argv[1]))
folder.begin()
folder.set_status("running", step=2)
print("owned", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "small",
            "loop": "rl",
            "runs_folder": str(tmp_path / "deep" / "runs"),
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"vllm": {"hf_token": "geheim"}, "sampling": {"stop": ["${x}"]}},
        }
    ).with_references({("rollout", "vllm", "hf_token"): "${oc.env:MY_TOKEN}"})


def status(recipe: Recipe) -> dict[str, object]:
    return json.loads((Path(recipe.runs_folder) / recipe.name / "status.json").read_text())


def test_a_new_folder_says_what_runs_and_how_it_stands(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "neu")
    folder = RunFolder(recipe)
    folder.begin()
    assert folder.path == Path(recipe.runs_folder) / "small"
    assert status(recipe) == {"state": "starting", "step": 0, "cause": None, "exit_code": None}
    kept = load(folder.path / "config.yaml")
    assert kept.rollout.sampling.stop == ("${x}",)
    assert kept.rollout.vllm == {"hf_token": "neu"}
    assert not any(b"geheim" in path.read_bytes() for path in folder.path.rglob("*") if path.is_file())
    assert (folder.logs_folder / "config.yaml").read_bytes() == (folder.path / "config.yaml").read_bytes()
    assert kept.model_dump(exclude={"rollout"}) == recipe.model_dump(exclude={"rollout"})
    folder.set_status("running", step=3)
    folder.set_status(step=4)
    assert status(recipe) == {"state": "running", "step": 4, "cause": None, "exit_code": None}
    folder.set_status("failed", cause="rank 2 died", exit_code=76, rank=2)
    assert status(recipe) == {"state": "failed", "step": 4, "cause": "rank 2 died", "exit_code": 76, "rank": 2}
    assert not list(folder.path.glob("*.partial")) and not list(folder.path.glob(".*.partial"))
    folder.close()


@pytest.mark.parametrize(
    ("error", "state", "code", "cause"),
    [
        pytest.param(None, "done", 0, None, id="done"),
        pytest.param(KeyboardInterrupt(), "interrupted", 130, "interrupted from the keyboard", id="interrupted"),
        pytest.param(DataError("line 3"), "failed", 65, "DataError: line 3", id="data"),
        pytest.param(PeerLostError("rank 1"), "failed", 76, "PeerLostError: rank 1", id="peer"),
        pytest.param(ZeroDivisionError("0 / 0"), "failed", 70, "ZeroDivisionError: 0 / 0", id="internal"),
    ],
)
def test_leaving_the_folder_writes_how_the_run_ended(
    recipe: Recipe, error: BaseException | None, state: str, code: int, cause: str | None
) -> None:
    def run() -> None:
        with RunFolder(recipe) as folder:
            folder.begin()
            folder.set_status("running", step=5)
            if error:
                raise error

    if error:
        with pytest.raises(type(error)):
            run()
    else:
        run()
    assert status(recipe) == {"state": state, "step": 5, "cause": cause, "exit_code": code}
    attempt = json.loads((Path(recipe.runs_folder) / recipe.name / "logs/attempt_1/attempt.json").read_text())
    assert {name: attempt[name] for name in ("state", "step", "cause", "exit_code")} == status(recipe)
    assert attempt["started"] <= attempt["ended"] and attempt["resumed_step"] == 0
    assert attempt["steps"] == recipe.train.steps
    assert {"python", "megarl", "torch"} <= attempt["versions"].keys() and attempt["machine"]["host"]


def test_a_folder_in_use_is_refused_until_its_owner_dies(recipe: Recipe) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, recipe.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "owned\n"
        with pytest.raises(RunFolderLockedError) as caught:
            RunFolder(recipe)
        assert f"pid {owner.pid}" in str(caught.value) and f"host {os.uname().nodename}" in str(caught.value)
        assert caught.value.exit_code == 73
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    # Dead: the folder is taken over, what it left is an earlier run.
    resumed = RunFolder(recipe, resume=True)
    assert resumed.dead_owner is not None and f"pid {owner.pid}" in resumed.dead_owner
    resumed.close()
    with pytest.raises(ConfigError, match="already holds a run, which is running at step 2"):
        RunFolder(recipe)
    (Path(recipe.runs_folder) / "small" / "status.json").unlink()
    RunFolder(recipe).close()


def test_a_run_whose_folder_was_taken_over_ends_with_73_and_writes_nothing(recipe: Recipe) -> None:
    with (
        pytest.raises(RunFolderLockedError, match="taken over by another process") as caught,
        RunFolder(recipe) as mine,
    ):
        mine.begin()
        mine.set_status("running", step=1)
        before = {path: path.read_bytes() for path in mine.path.rglob("*") if path.is_file()}
        later = mine.path / "owners/00000002"
        later.touch()
        mine.set_status(step=2)
    assert caught.value.exit_code == 73
    after = {path: path.read_bytes() for path in mine.path.rglob("*") if path.is_file()}
    released = mine.path / "owners/00000001"
    assert after.pop(later) == b"" and {**after, released: b""} == {**before, released: b""}


def test_an_earlier_run_is_not_overwritten(recipe: Recipe) -> None:
    with RunFolder(recipe) as folder:
        folder.begin()
        folder.set_status("running", step=12)
    before = {
        path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file() and path.parent.name != "owners"
    }
    for _ in range(2):  # The refusal itself leaves no lock behind.
        with pytest.raises(ConfigError, match=r"name: .*small already holds a run, which is done at step 12\. Choose"):
            RunFolder(recipe)
    assert {path: path.read_bytes() for path in before} == before
    (folder.path / "status.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunFolder(recipe)


def test_a_folder_that_cannot_be_made_is_a_config_error(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("a file")
    with pytest.raises(ConfigError, match=r"runs_folder: .* cannot be created"):
        RunFolder(recipe)


def begun(recipe: Recipe, step: int | None = None, most_restarts: int | None = None, **how: bool) -> RunFolder:
    folder = RunFolder(recipe, **how)
    try:
        folder.begin(step, most_restarts)
    finally:
        folder.close()
    return folder


def test_a_resumed_folder_forgets_what_came_after_its_checkpoint(recipe: Recipe) -> None:
    with RunFolder(recipe) as folder:
        folder.begin()
        folder.set_status("running", step=7)
        folder.metrics_file.write_text('{"step": 0}\n{"step": 4, "x": 1}\n{"step": 5}\n{"step": 6, "x"')
        for step in (0, 4, 5):
            (folder.samples_folder / f"step_{step:06d}.jsonl").write_text("{}\n")
            (folder.tokens_folder / f"step_{step:06d}.jsonl").write_text("{}\n")
        folder.tensorboard_folder.mkdir()
    with RunFolder(recipe, resume=True) as folder:
        assert folder.begin(4) == 0
        assert status(recipe)["step"] == status(recipe)["resumed_step"] == folder.resumed_step == 4
        assert folder.metrics_file.read_text() == '{"step": 0}\n{"step": 4, "x": 1}\n'
        left = sorted(path.name for path in folder.samples_folder.iterdir())
        assert left == ["step_000000.jsonl", "step_000004.jsonl"] and folder.tensorboard_folder.exists()
        assert sorted(path.name for path in folder.tokens_folder.iterdir()) == left
    # Taken up from the same step again, and once more than is allowed, which changes nothing.
    begun(recipe, 4, 2, resume=True)
    assert status(recipe)["restarts"] == 1
    begun(recipe, 4, 2, resume=True)
    with pytest.raises(MegarlError, match="resumed 2 times from step 4 without completing a further step"):
        begun(recipe, 4, 2, resume=True)
    assert status(recipe)["restarts"] == 2 and len(list((folder.path / "logs").glob("attempt_*"))) == 4
    begun(recipe, 5, 2, resume=True)
    assert "restarts" not in status(recipe)
    begun(recipe, None, resume=True)
    assert "resumed_step" not in status(recipe)
    assert folder.metrics_file.read_text() == "" and not list(folder.samples_folder.iterdir())
    assert not folder.tensorboard_folder.exists()


def test_config_yaml_is_of_the_newest_attempt_that_gained_a_step(recipe: Recipe) -> None:
    with RunFolder(recipe) as folder:
        folder.begin()
        folder.set_status("running", step=4)
    changed = recipe.model_copy(update={"seed": 5})
    first, second = to_yaml(recipe), to_yaml(changed)
    with RunFolder(changed, resume=True) as folder:
        folder.begin(4)
        assert (folder.path / "config.yaml").read_text() == first
        assert (folder.logs_folder / "config.yaml").read_text() == second
        folder.set_status("running")
        assert (folder.path / "config.yaml").read_text() == first
        folder.set_status(step=5)
        assert (folder.path / "config.yaml").read_text() == second
    assert (folder.path / "logs/attempt_1/config.yaml").read_text() == first


def test_a_start_that_gained_no_step_does_not_occupy_its_name(recipe: Recipe) -> None:
    def fail() -> None:
        with RunFolder(recipe) as folder:
            folder.begin()
            folder.metrics_file.write_text('{"step": 0}\n')
            raise DataError("line 3")

    for _ in range(2):
        with pytest.raises(DataError):
            fail()
    folder = begun(recipe)
    assert folder.metrics_file.read_text() == "" and folder.logs_folder.name == "attempt_3"
    checkpoint = folder.checkpoints_folder / "step_000004"
    for name in ("step_000004", "step_000004.damaged"):
        checkpoint.with_name(name).mkdir(parents=True)
        with pytest.raises(ConfigError, match=rf"already holds a run, with checkpoints \({name}\)\. Choose"):
            begun(recipe)
        checkpoint.with_name(name).rmdir()
    begun(recipe)


def test_a_run_begun_anew_keeps_what_was_there(recipe: Recipe) -> None:
    with RunFolder(recipe) as folder:
        folder.begin()
        folder.set_status("running", step=7)
        folder.metrics_file.write_text('{"step": 0}\n')
        (folder.checkpoints_folder / "step_000007").mkdir(parents=True)
    for number in (1, 2):
        again = begun(recipe, restart=True)
        assert not again.metrics_file.exists() and not again.checkpoints_folder.exists()
        assert again.logs_folder.name == "attempt_1" and status(recipe)["step"] == 0
        assert len(list((folder.path / "earlier").iterdir())) == number
    kept = min((folder.path / "earlier").iterdir())
    assert (kept / "metrics.jsonl").read_text() == '{"step": 0}\n' and (kept / "checkpoints/step_000007").is_dir()
    assert json.loads((kept / "status.json").read_text())["step"] == 7


def test_stray_names_and_unreadable_content_are_tolerated(recipe: Recipe) -> None:
    with RunFolder(recipe) as folder:
        folder.begin()
        folder.set_status("running", step=7)
    folder.metrics_file.write_bytes(b'{"step": 1}\n\xff\xfe\n[3]\n{"step": 2}\n{"step": 9}\n{"st\xff')
    for name in ("step_x.jsonl", "step_000009.jsonl.bak", "step_000009.jsonl"):
        (folder.samples_folder / name).write_text("{}\n")
    for name in ("attempt_old", "attempt_1.bak", "notes"):
        (folder.path / "logs" / name).mkdir()
    (folder.path / "status.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"whose status\.json cannot be read"):
        begun(recipe)
    with RunFolder(recipe, resume=True) as folder:
        assert folder.begin(2) == 2
    assert folder.metrics_file.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert sorted(path.name for path in folder.samples_folder.iterdir()) == ["step_000009.jsonl.bak", "step_x.jsonl"]
    assert folder.logs_folder.name == "attempt_2"


def test_a_resume_on_a_full_disk_ends_with_74_and_loses_nothing(
    recipe: Recipe, no_file_may_grow: Callable[[], AbstractContextManager[None]]
) -> None:
    with RunFolder(recipe) as folder:
        folder.begin()
        folder.set_status("running", step=7)
        folder.metrics_file.write_text('{"step": 0}\n{"step": 4}\n{"step": 5}\n')
        (folder.samples_folder / "step_000005.jsonl").write_text("{}\n")
    before = {
        path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file() and path.parent.name != "owners"
    }
    with no_file_may_grow(), pytest.raises(StorageError) as caught:
        begun(recipe, 4, resume=True)
    assert caught.value.exit_code == 74 and str(folder.path) in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    assert begun(recipe, 4, resume=True).metrics_file.read_text() == '{"step": 0}\n{"step": 4}\n'
