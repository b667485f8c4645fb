"""The SDK's RestClient: listings of one key's things, lifetimes, deletion, and refusals that name what works."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.service.refusals import NotFoundError, UserError
from megarl.service.storage.checkpoints import Checkpoints
from tests.service.fake_trainer import FakeTrainer
from tests.service.served import run_program, serving
from tests.service.test_access import ACCOUNTS

RUN = "a1:train:0"


async def test_the_rest_client_sees_what_its_key_has(tmp_path: Path) -> None:
    async with serving(FakeTrainer(), tmp_path, ACCOUNTS) as url:
        found = await run_program(url, "listing", SDK_KEY="tml-a", SDK_OTHER="tml-b")
    run_id, [state, sampler_path] = found["run id"], found["paths"]
    [one] = found["runs"]["training_runs"]
    assert one == found["run"] and one["training_run_id"] == found["by path"] == run_id
    assert (one["model_owner"], one["lora_rank"], found["info"]) == ("ann", 8, 8)
    assert one["last_checkpoint"]["tinker_path"] == state
    assert one["last_sampler_checkpoint"]["tinker_path"] == sampler_path
    newest, oldest = found["of run"]["checkpoints"]
    assert (newest["checkpoint_id"], newest["checkpoint_type"]) == ("sampler_weights/second", "sampler")
    assert newest["expires_at"] is not None and oldest["expires_at"] is None
    assert oldest["user_metadata"] == {"note": "x"} and oldest["size_bytes"] > 100
    assert found["page"]["checkpoints"] == [oldest] and found["page"]["cursor"]["total_count"] == 2
    assert found["session"]["training_run_ids"] == [run_id]
    assert found["foreign"] == [[], []]
    assert found["lifetimes"] == [True, False] and found["left"] == [sampler_path]
    errors = found["errors"]
    for label in ("foreign run", "foreign checkpoints", "foreign session", "foreign delete", "foreign ttl"):
        assert "does not exist" in errors[label] and "NotFoundError" in errors[label], errors[label]
    words = {"publish": "one key", "unpublish": "one key", "copy": "load it there", "download": "own disk",
             "project": "no projects", "ttl": "3600", "external": "save_state"}  # fmt: skip
    assert errors.keys() == words.keys() | {label for label in errors if label.startswith("foreign")}
    for label, text in words.items():
        assert text in errors[label], errors[label]


def save(checkpoints: Checkpoints, name: str, text: str, owner: str = "ann") -> None:
    partial = checkpoints.begin_checkpoint(RUN, "weights", name, owner, overwrite=True)
    (partial / "state").write_text(text)
    checkpoints.complete_checkpoint(
        partial, name, {"owner": owner, "kind": "weights", "base_model": "m", "rank": 8}, None
    )


def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, print)
    save(checkpoints, "kept", "first")
    rename = Path.rename

    def die(path: Path, target: Path) -> Path:
        if path.name.startswith(".partial_"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            save(checkpoints, "kept", "second")
    assert not checkpoints.list_stored("ann")
    folder, _ = Checkpoints(tmp_path, print).find_checkpoint(f"tinker://{RUN}/weights/kept", "ann")
    assert (folder / "state").read_text() == "first"
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]


def test_a_checkpoint_that_is_read_is_neither_deleted_nor_replaced(tmp_path: Path) -> None:
    now = [1000.0]
    checkpoints = Checkpoints(tmp_path, print, lambda: now[0])
    save(checkpoints, "kept", "first")
    path = f"tinker://{RUN}/weights/kept"
    folder, record = checkpoints.find_checkpoint(path, "ann")
    checkpoints.set_lifetime(path, "ann", 3600)
    with checkpoints.keep_while_reading(folder, record["time"]):
        with pytest.raises(UserError, match="being loaded"):
            checkpoints.delete_checkpoint(path, "ann")
        with pytest.raises(UserError, match="being loaded"):
            save(checkpoints, "kept", "second")
        now[0] += 3601
        checkpoints.delete_expired()
        assert (folder / "state").exists()
    checkpoints.delete_expired()
    assert not folder.exists()
    with pytest.raises(NotFoundError), checkpoints.keep_while_reading(folder, record["time"]):
        pass
    save(checkpoints, "kept", "second")
    with pytest.raises(NotFoundError, match="replaced"), checkpoints.keep_while_reading(folder, record["time"]):
        pass


def test_an_account_cannot_fill_the_disk(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, print, max_bytes=100)
    save(checkpoints, "one", "x" * 60)
    save(checkpoints, "two", "x" * 60)
    with pytest.raises(UserError, match="delete_checkpoint"):
        save(checkpoints, "three", "x")
    save(checkpoints, "other", "x", owner="bob")
    checkpoints.delete_checkpoint(f"tinker://{RUN}/weights/one", "ann")
    save(checkpoints, "three", "x")


@pytest.mark.parametrize("name", ["kept\n", "kept/../kept", ".partial_1", ""])
def test_only_a_whole_name_is_a_name(tmp_path: Path, name: str) -> None:
    checkpoints = Checkpoints(tmp_path, print)
    save(checkpoints, "kept", "first")
    with pytest.raises(NotFoundError):
        checkpoints.find_checkpoint(f"tinker://{RUN}/weights/{name}", "ann")
