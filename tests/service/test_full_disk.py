"""A full disk under the checkpoints of a service: the client's save fails, and everything else goes on."""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from megarl.service.storage.checkpoints import Checkpoints
from megarl.types import DataError, StorageError
from tests.service.fake_trainer import FakeTrainer
from tests.service.served import serving
from tests.service.test_access import Client, make_model
from tests.service.test_delivery import training_body
from tests.tracking.test_full_disk import fill


async def test_a_full_disk_fails_a_save_and_the_service_goes_on(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=256k")
    async with serving(FakeTrainer(), disk) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        address = {"model_id": model_id, "path": "saved"}
        first = await client.result("save_weights", address | {"seq_id": 1})
        ballast = fill(disk)
        failed = await client.result("save_weights", address | {"seq_id": 2, "overwrite": True})
        assert failed["category"] == "user" and "path = saved" in failed["error"]
        assert str(disk) not in failed["error"], "folders of the service are not the client's"
        sampler = await client.result("save_weights_for_sampler", address | {"seq_id": 3})
        assert sampler["category"] == "user"
        # Lifetimes are written too.
        route = f"training_runs/{model_id}/checkpoints/weights/saved/ttl"
        async with http.put(f"{url}/api/v1/{route}", json={"ttl_seconds": 3600}) as reply:
            assert reply.status == 422
        names = [file.relative_to(disk) for file in disk.rglob("*") if file.is_file() and file != ballast]
        folder = Path(model_id) / "weights" / "saved"
        assert sorted(names) == [folder / "logits.npy", folder / "service.json"], "nothing is half written"
        step = await client.result("optim_step", {"model_id": model_id, "seq_id": 4, "adam_params": {}})
        assert "metrics" in step
        ballast.unlink()
        again = await client.result("save_weights", address | {"seq_id": 5, "overwrite": True})
        assert again["path"] == first["path"]
        loaded = await client.result("load_weights", address | {"seq_id": 6, "optimizer": True} | first)
        assert loaded["model_id"] == model_id


async def test_refused_saves_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in use, a key's limit of bytes, a wrong name, a body that cannot be read: the next step runs."""
    trainer = FakeTrainer()
    async with serving(trainer, tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        gradient = training_body(model_id, 1, [1, 2], 1.0)
        assert (await client.post("forward_backward", raw=gradient))[0] == 200
        numbers = itertools.count(2)

        async def save(**values: Any) -> Any:
            return await client.result("save_weights", {"model_id": model_id, "seq_id": next(numbers)} | values)

        assert "path" in await save(path="taken")
        refusals = [
            await save(path="taken"),
            await save(path="a/b"),
            await save(path="deep", user_metadata=json.loads('{"a":' * 70 + "1" + "}" * 70)),
        ]
        monkeypatch.setattr("megarl.service.storage.checkpoints.MAX_CHECKPOINTS", 1)
        refusals.append(await save(path="other"))
        assert [refusal["category"] for refusal in refusals] == ["user"] * 4
        step = await client.result("optim_step", {"model_id": model_id, "seq_id": next(numbers), "adam_params": {}})
        assert step["metrics"]["grad_norm:mean"] > 0, "the gradients before the saves are in the step"


class FaultyTrainer(FakeTrainer):
    """A trainer that cannot load checkpoints."""

    error: Exception = DataError("/disk/checkpoints/file: cut short")

    async def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        raise self.error

    async def publish_folder(self, folder: Path, version: str) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "problem"),
    [(DataError, "its files are damaged"), (StorageError, "the disk of the service fails"), (OSError, "fails")],
)
async def test_a_checkpoint_that_cannot_be_read_fails_the_requests_for_it_alone(
    tmp_path: Path, error: type[Exception], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = FaultyTrainer()
    trainer.error = error("/disk/checkpoints/file: cut short")
    async with serving(trainer, tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        session_id, model_id = await make_model(client)
        saved = await client.result("save_weights", {"model_id": model_id, "seq_id": 1, "path": "saved"})
        source = {"path": saved["path"], "optimizer": True}
        loaded = await client.result("load_weights", {"session_id": session_id, "model_seq_id": 5} | source)
        again = await client.result("load_weights", {"model_id": model_id, "seq_id": 2} | source)
        _, sampler = await client.post(
            "create_sampling_session",
            {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": saved["path"]},
        )
        sampled = await client.result(
            "asample",
            {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 0, "sampling_params": {},
             "prompt": {"chunks": [{"tokens": [1]}]}},
        )  # fmt: skip
        for reply in (loaded, again, sampled):
            assert reply["category"] == "user"
            assert reply["error"].startswith(f"path = {saved['path']}: ") and problem in reply["error"]
            assert "/disk" not in reply["error"], "folders of the service are not the client's"
        assert capsys.readouterr().out.count("/disk/checkpoints/file: cut short") == 3, "the operator learns them"
        step = await client.result("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}})
        assert "metrics" in step


def test_an_earlier_checkpoint_stays_if_the_last_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, rename = Checkpoints(tmp_path, print), Path.rename
    first = checkpoints.begin_checkpoint("a:train:0", "weights", "one", "ann", overwrite=False)
    (first / "state").write_text("first")
    checkpoints.complete_checkpoint(first, "one", {"owner": "ann"}, None)
    second = checkpoints.begin_checkpoint("a:train:0", "weights", "one", "ann", overwrite=True)

    def fail_new_folder(path: Path, target: Path) -> Path:
        if path == second:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_new_folder)
    with pytest.raises(OSError):
        checkpoints.complete_checkpoint(second, "one", {"owner": "ann"}, None)
    folder, _ = checkpoints.find_checkpoint("tinker://a:train:0/weights/one", "ann")
    assert (folder / "state").read_text() == "first"
