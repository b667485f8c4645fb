"""Faults during saves: a run that is resumed finds the newest complete checkpoint, and never a mixed one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.checkpoint.manifest import check_hashes, check_sizes, file_record, write_manifest
from megarl.types import DataError
from tests.faults.broken_runs import BrokenRuns


@pytest.mark.end_to_end
@pytest.mark.fault_runs
@pytest.mark.parametrize(
    ("point", "left", "resumed"),
    [
        pytest.param("manifest", [".step_000004.partial", "step_000002"], 2, id="before the manifest"),
        pytest.param("publish", [".step_000004.partial", "step_000002"], 2, id="before the rename"),
        pytest.param("latest", ["step_000002", "step_000004"], 4, id="before latest"),
    ],
)
def test_row_6_killed_between_data_manifest_and_latest(
    broken_runs: BrokenRuns, point: str, left: list[str], resumed: int
) -> None:
    end = broken_runs.train("train.steps=5", fault=f"{point}:driver:4:kill")
    assert end.exit_code == -9 and end.left == [] and broken_runs.checkpoints() == left
    latest = broken_runs.run / "checkpoints/latest"
    assert latest.read_text() == "step_000002\n"
    end = broken_runs.train("train.steps=5", "--resume")
    assert end.status["state"] == "done" and end.status["step"] == 5, end.output
    assert f"step_{resumed:06d}" in end.output
    assert not [name for name in broken_runs.checkpoints() if name.startswith(".")]
    assert latest.read_text() == "step_000005\n"


def test_row_9_a_shard_of_another_step(tmp_path: Path) -> None:
    folders = [tmp_path / "step_000002", tmp_path / "step_000004"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        for rank in range(2):
            (folder / f"__{rank}_0.distcp").write_bytes(bytes([number]) * 64)
        files = {path.name: file_record(path) for path in folder.iterdir()}
        write_manifest(folder, files, {"format": "torch_dist"})
        check_hashes(folder, check_sizes(folder))
    shutil.copyfile(folders[0] / "__1_0.distcp", folders[1] / "__1_0.distcp")
    with pytest.raises(DataError, match=r"step_000004/__1_0\.distcp: its sha256"):
        check_hashes(folders[1], check_sizes(folders[1]))
    (folders[1] / "__1_0.distcp").unlink()
    with pytest.raises(DataError, match=r"step_000004/__1_0\.distcp: not found"):
        check_sizes(folders[1])


@pytest.mark.end_to_end
@pytest.mark.fault_runs
def test_row_11_a_file_system_that_does_not_answer(broken_runs: BrokenRuns) -> None:
    end = broken_runs.train("cluster.checkpoint_timeout_seconds=3", fault="save_write:1:4:sleep:600")
    assert end.exit_code == 76 and end.left == [], end.output
    assert 3.0 <= end.seconds < 3.0 + 30.0
    assert end.status["rank"] == 1
    assert "`save_checkpoint` within 3 s" in end.status["cause"], end.status
    assert "cluster.checkpoint_timeout_seconds" in end.status["cause"]
    assert "step_000002" in broken_runs.checkpoints()


@pytest.mark.end_to_end
@pytest.mark.fault_runs
def test_row_12_a_failed_save_never_removes_the_only_good_checkpoint(broken_runs: BrokenRuns) -> None:
    end = broken_runs.train("checkpoint.keep=1", fault="save_finish:1:4:disk_full")
    assert end.exit_code == 74 and end.left == [], end.output
    assert broken_runs.checkpoints() == ["step_000002"]
    end = broken_runs.train("checkpoint.keep=1", "--resume")
    assert end.status["state"] == "done" and broken_runs.checkpoints() == ["step_000004"]
