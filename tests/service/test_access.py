"""Keys, foreign ids, and bodies that cannot be read: what a client learns, and with which status."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from megarl.service.handlers.desk import Desk
from megarl.service.handlers.models import MAX_MODELS
from megarl.service.http.accounts import Accounts, read_accounts
from megarl.service.messages import wire
from megarl.service.messages.requests import CreateModel, CreateSession, LoraSettings
from megarl.service.storage.checkpoints import Checkpoints
from megarl.service.storage.published import PublishedWeights, Weights
from megarl.types import ConfigError
from tests.service.fake_trainer import FakeTrainer
from tests.service.served import serving


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


ACCOUNTS = Accounts({"ann": digest("tml-a"), "bob": digest("tml-b")})


class Client:
    """A client that sends JSON with a key."""

    def __init__(self, session: ClientSession, url: str, key: str) -> None:
        self._session, self._url, self._key = session, url, key

    async def post(self, path: str, body: Any = None, raw: bytes | None = None, **headers: str) -> tuple[int, Any]:
        data = {"data": raw} if raw is not None else {"json": {} if body is None else body}
        headers = {"X-API-Key": self._key, **headers}
        async with self._session.post(f"{self._url}/api/v1/{path}", headers=headers, **data) as reply:
            return reply.status, await reply.json()

    async def result(self, path: str, body: Any) -> Any:
        status, promise = await self.post(path, body)
        assert status == 200, promise
        status, reply = await self.post("retrieve_future", {"request_id": promise["request_id"]})
        assert status == 200
        return reply


async def make_model(client: Client, number: int = 0) -> tuple[str, str]:
    _, session = await client.post("create_session")
    body = {
        "session_id": session["session_id"], "model_seq_id": number, "base_model": "Qwen/Qwen3-8B",
        "lora_config": {"rank": 8, "seed": 1},
    }  # fmt: skip
    reply = await client.result("create_model", body)
    return session["session_id"], reply["model_id"]


async def test_a_key_sees_nothing_of_another(tmp_path: Path) -> None:
    async with serving(FakeTrainer(), tmp_path, ACCOUNTS) as url, ClientSession() as http:
        ann, bob = Client(http, url, "tml-a"), Client(http, url, "tml-b")
        session_id, model_id = await make_model(ann)
        saved = await ann.result("save_weights", {"model_id": model_id, "seq_id": 1, "path": "kept"})
        sampler = await ann.result(
            "save_weights_for_sampler", {"model_id": model_id, "seq_id": 2, "sampling_session_seq_id": 0}
        )
        sampler_id = sampler["sampling_session_id"]
        _, promise = await ann.post("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}})
        bobs_session, _ = await make_model(bob)
        sample = {
            "sampling_session_id": sampler_id, "seq_id": 0, "sampling_params": {"max_tokens": 2},
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        }  # fmt: skip
        foreign: list[tuple[str, Any]] = [
            ("get_info", {"model_id": model_id}),
            ("optim_step", {"model_id": model_id, "seq_id": 4}),
            ("save_weights", {"model_id": model_id, "seq_id": 4, "path": "x"}),
            ("save_weights_for_sampler", {"model_id": model_id, "seq_id": 4, "path": "x"}),
            ("retrieve_future", {"request_id": promise["request_id"]}),
            ("asample", sample),
            ("weights_info", {"tinker_path": saved["path"]}),
            ("create_sampling_session",
             {"session_id": bobs_session, "sampling_session_seq_id": 0, "model_path": saved["path"]}),
            ("create_model", {"session_id": session_id, "model_seq_id": 9, "base_model": "Qwen/Qwen3-8B"}),
        ]  # fmt: skip
        for path, body in foreign:
            status, reply = await bob.post(path, body)
            missing, missing_reply = await bob.post(path, _with_other_ids(body))
            assert (path, status, missing) == (path, 404, 404)
            assert reply.keys() == missing_reply.keys() == {"error"}
        # Promises that name a foreign path fail like those that name none.
        reply = await bob.result(
            "load_weights",
            {"session_id": bobs_session, "model_seq_id": 5, "path": saved["path"], "optimizer": True},
        )
        assert "does not exist" in reply["error"] and reply["category"] == "user"
        assert (await bob.post("session_heartbeat", {"session_id": session_id}))[0] == 410
        assert (await bob.post(f"sessions/{session_id}/finish"))[0] == 200
        assert (await ann.post("session_heartbeat", {"session_id": session_id}))[0] == 200
        assert (await ann.post("get_info", {"model_id": model_id}))[0] == 200
        for key in ("", "tml-c", "tml-A", "\udcff"):
            assert (await Client(http, url, key).post("create_session"))[0] == 401


def _with_other_ids(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    return {
        name: value
        if name in ("path", "base_model", "seq_id", "model_seq_id") or not isinstance(value, str)
        else "none"
        for name, value in body.items()
    }


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../../etc/passwd", "tinker://a:train:0/weights/..", "tinker://a:train:0/weights/.hidden",
        "tinker://a:train:0/other/x", "tinker://a:train:0/weights/x/y", "/etc/passwd", "", "tinker://%2e%2e/weights/x",
    ],
)  # fmt: skip
async def test_a_path_cannot_leave_the_folder(tmp_path: Path, path: str) -> None:
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        status, _ = await client.post("weights_info", {"tinker_path": path})
        assert status == 404


async def test_wrong_fields_fail_their_promise_and_use_their_number(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with serving(trainer, tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        wrong = {"adam_params": {"learning_rate": -1.0}, "optimizer_params": {"type": "dimuon", "version": 1}}
        for number, (name, value) in enumerate(wrong.items(), 1):
            reply = await client.result("optim_step", {"model_id": model_id, "seq_id": number, name: value})
            word = "learning_rate" if name == "adam_params" else "type = dimuon"
            assert reply["category"] == "user" and word in reply["error"]
        for number, name in enumerate(("../x", ".x", "a/b", ""), 3):
            reply = await client.result("save_weights", {"model_id": model_id, "seq_id": number, "path": name})
            assert reply["category"] == "user" and reply["error"].startswith("path")
        reply = await client.result("optim_step", {"model_id": model_id, "seq_id": 7, "adam_params": {}})
        assert reply["metrics"] == {"grad_norm:mean": 0.0}
        saved = {"model_id": model_id, "path": "once"}
        first = await client.result("save_weights", saved | {"seq_id": 8})
        second = await client.result("save_weights", saved | {"seq_id": 9})
        third = await client.result("save_weights", saved | {"seq_id": 10, "overwrite": True})
        assert "exists" in second["error"] and first["path"] == third["path"]


async def test_what_would_do_nothing_is_refused_or_named(tmp_path: Path) -> None:
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        session_id, model_id = await make_model(client)
        saved = await client.result("save_weights", {"model_id": model_id, "seq_id": 1, "path": "kept"})
        load = {"path": saved["path"], "optimizer": False, "weights_access_token": "of-another-key"}
        for number, (path, body, fault) in enumerate(
            (
                ("optim_step", {}, "adam_params is missing"),
                ("save_weights_for_sampler", {"kind": "inflight", "path": "named"}, "kind = inflight"),
                ("save_weights_for_sampler", {"sampling_session_seq_id": 1, "ttl_seconds": 3600}, "ttl_seconds = 3600"),
                ("load_weights", load, "weights_access_token"),
            ),
            2,
        ):
            reply = await client.result(path, {"model_id": model_id, "seq_id": number} | body)
            assert reply["category"] == "user" and reply["error"].startswith(fault), reply
        sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": saved["path"]}
        status, reply = await client.post("create_sampling_session", sampler | {"base_model": "other"})
        assert status == 422 and reply["error"].startswith("base_model = other")
        assert (await client.post("create_sampling_session", sampler | {"base_model": "Qwen/Qwen3-8B"}))[0] == 200
        for project, is_named in ((None, False), ("p", True)):
            _, session = await client.post("create_session", {"project_id": project})
            assert ("project_id has no effect" in session["info_message"]) == is_named


async def test_parallel_requests_for_models_stay_within_the_limit(tmp_path: Path) -> None:
    class SlowTrainer(FakeTrainer):
        async def create_model(self, *arguments: Any) -> None:
            await asyncio.sleep(0.2)
            await super().create_model(*arguments)

    async with serving(SlowTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, session = await client.post("create_session")
        body = {"session_id": session["session_id"], "base_model": "Qwen/Qwen3-8B", "lora_config": {"rank": 8}}
        requests = (client.result("create_model", body | {"model_seq_id": number}) for number in range(MAX_MODELS + 3))
        replies = await asyncio.gather(*requests)
        assert sum("model_id" in reply for reply in replies) == MAX_MODELS
        assert sum(reply.get("category") == "user" for reply in replies) == 3


async def test_an_idle_model_moves_to_disk_once_and_its_heartbeat_does_not_keep_it(tmp_path: Path) -> None:
    now, trainer = [0.0], FakeTrainer()
    desk = Desk(trainer, Checkpoints(tmp_path, print), report=print, clock=lambda: now[0], idle_seconds=60.0)
    session_id = desk.sessions.open(CreateSession(), "ann")
    lora = LoraSettings(rank=8)
    body = CreateModel(session_id=session_id, model_seq_id=0, base_model="Qwen/Qwen3-8B", lora_config=lora)
    promise = desk.models.create(body, "ann")
    await promise.done.wait()
    for seconds in (50, 70, 130, 190):
        now[0] = seconds
        desk.sessions.touch(session_id, "ann")
        await desk.expire()
    moved = ("to disk", promise.model_id)
    assert trainer.calls.count(moved) == 1
    step = desk.training.optim_step({"model_id": promise.model_id, "seq_id": 1, "adam_params": {}}, "ann")
    await step.done.wait()
    now[0] += 61
    await desk.expire()
    assert trainer.calls.count(moved) == 2
    await desk.close()


async def test_copies_to_sample_from_are_limited_and_those_of_checkpoints_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.service.storage.published.MAX_PUBLISHED", 2)
    trainer = FakeTrainer()
    async with serving(trainer, tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        session_id, model_id = await make_model(client)
        saved = await client.result("save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "path": "kept"})
        address = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": saved["path"]}
        _, sampler = await client.post("create_sampling_session", address)
        samplers = [sampler["sampling_session_id"]]
        for number in range(2, 6):
            body = {"model_id": model_id, "seq_id": number, "sampling_session_seq_id": number}
            samplers.append((await client.result("save_weights_for_sampler", body))["sampling_session_id"])

        async def sample(sampler_id: str, number: int) -> bytes:
            asked = {
                "sampling_session_id": sampler_id, "seq_id": number, "sampling_params": {"max_tokens": 2},
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            }  # fmt: skip
            _, promise = await client.post("asample", asked)
            headers = {"X-API-Key": "tml-a"}
            poll = {"request_id": promise["request_id"]}
            async with http.post(f"{url}/api/v1/retrieve_future", json=poll, headers=headers) as reply:
                return await reply.read()

        for number in range(2):
            for sampler_id in (samplers[0], *samplers[-1:]):
                assert b"error" not in await sample(sampler_id, number)
        assert b"newer ones" in await sample(samplers[1], 0)
        # The base model, and two copies.
        assert len(trainer.versions) == 3


async def test_a_poll_with_a_known_key_outlasts_the_time_for_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.serving.http_server.HEAD_SECONDS", 0.3)

    class SlowTrainer(FakeTrainer):
        async def clear_gradients(self, model_id: str) -> None:
            await asyncio.sleep(60)

    async with serving(SlowTrainer(), tmp_path, ACCOUNTS) as url, ClientSession() as http:
        ann = Client(http, url, "tml-a")
        _, model_id = await make_model(ann)
        # A refused step clears the gradients.
        wrong_step = {"model_id": model_id, "seq_id": 1, "adam_params": {"eps": 0}}
        assert (await ann.result("optim_step", wrong_step))["type"] == "try_again"


async def test_bodies_that_cannot_be_read_are_refused_without_a_retry(tmp_path: Path) -> None:
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        assert (await client.post("optim_step", raw=b"{"))[0] == 400
        assert (await client.post("optim_step", raw=b"[]"))[0] == 400
        assert (await client.post("optim_step", {"model_id": 3}))[0] == 422
        assert (await client.post("forward_backward", raw=b"\xff\xff\xff"))[0] in (400, 404)
        assert (await client.post("forward_backward", raw=b"x", **{"Content-Encoding": "gzip"}))[0] == 415
        assert (await client.post("telemetry", raw=gzip.compress(b"{}"), **{"Content-Encoding": "gzip"}))[0] == 415


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("", "has no account"),
        ("ann tml-a\n", ":1: is not NAME"),
        (f"ann {digest('a')}\nann {digest('b')}\n", ":2: names ann again"),
    ],
)
def test_a_file_of_keys_is_right_or_one_error(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_accounts(file, "0.0.0.0")
    assert words in str(refused.value)


def test_other_machines_need_keys(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "10.0.0.3", "::", "node7"):
        with pytest.raises(ConfigError, match="--keys"):
            read_accounts(None, host)
    for host in ("127.0.0.1", "::1", "localhost"):
        assert read_accounts(None, host).find_owner("anything") == "local"
    file = tmp_path / "keys"
    file.write_text(f"# team\nann {digest('tml-a')}\n")
    accounts = read_accounts(file, "0.0.0.0")
    assert accounts.find_owner("tml-a") == "ann" and accounts.find_owner("tml-b") is None


async def test_a_save_whose_session_ends_is_finished_before_its_folder_moves(tmp_path: Path) -> None:
    class SlowTrainer(FakeTrainer):
        begun, goes_on, has_folder = asyncio.Event(), asyncio.Event(), False

        async def save(self, model_id: str, folder: Path) -> None:
            self.begun.set()
            await self.goes_on.wait()
            self.has_folder = folder.exists()

    trainer = SlowTrainer()
    async with serving(trainer, tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        session_id, model_id = await make_model(client)
        await client.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "last"})
        await trainer.begun.wait()
        assert (await client.post(f"sessions/{session_id}/finish"))[0] == 200
        trainer.goes_on.set()
        path = {"tinker_path": f"tinker://{model_id}/weights/last"}
        async with asyncio.timeout(20):
            while (await client.post("weights_info", path))[0] != 200:
                await asyncio.sleep(0.01)
        assert trainer.has_folder


async def test_a_copy_whose_session_ends_while_it_is_made_is_forgotten(tmp_path: Path) -> None:
    class SlowTrainer(FakeTrainer):
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def publish_folder(self, folder: Path, version: str) -> None:
            self.begun.set()
            await self.goes_on.wait()
            self.versions[version] = self.versions[None]

    trainer, checkpoints = SlowTrainer(), Checkpoints(tmp_path, print)
    partial = checkpoints.begin_checkpoint("a1:train:0", "weights", "saved", "ann", overwrite=False)
    checkpoints.complete_checkpoint(partial, "saved", {"owner": "ann"}, None)
    published = PublishedWeights(trainer, checkpoints)
    folder, record = checkpoints.find_checkpoint("tinker://a1:train:0/weights/saved", "ann")
    weights = Weights("ann", "session", folder=folder, saved_at=record["time"])

    async def sample() -> None:
        async with published.hold_weights(weights) as version:
            assert version in trainer.versions and version is not None

    request = asyncio.create_task(sample())
    await trainer.begun.wait()
    assert published.end_session("session") == []
    trainer.goes_on.set()
    await request
    assert trainer.versions.keys() == {None}


async def test_a_load_drops_what_a_failed_call_left(tmp_path: Path) -> None:
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        address = {"model_id": model_id}
        saved = await client.result("save_weights", address | {"seq_id": 1, "path": "saved"})
        failing = wire.load_messages().ForwardBackwardRequest(model_id=model_id, seq_id=2, loss_fn="unknown")
        assert (await client.post("forward_backward", raw=failing.SerializeToString()))[0] == 200
        body = {"seq_id": 3, "path": saved["path"], "optimizer": True}
        assert (await client.result("load_weights", address | body))["model_id"] == model_id
        reply = await client.result("optim_step", address | {"seq_id": 4, "adam_params": {}})
        assert "metrics" in reply
