"""Hostile clients with a valid key: what they send is refused soon, and other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession

from megarl.service.messages import wire
from megarl.service.messages.requests import (
    CreateModel,
    CreateSampler,
    LoadWeights,
    OptimStep,
    SampleRequest,
    read_fields,
)
from megarl.service.refusals import UserError
from megarl.serving.body import read_head
from tests.service.fake_trainer import FakeTrainer
from tests.service.served import serving
from tests.service.test_access import ACCOUNTS, Client, make_model

KEY = "X-API-Key"


async def read_result(http: ClientSession, url: str, request_id: str, key: str = "tml-a") -> bytes:
    """Poll for a result until it is there, as the SDK does."""
    while True:
        poll, headers = {"request_id": request_id}, {KEY: key}
        async with http.post(f"{url}/api/v1/retrieve_future", json=poll, headers=headers) as reply:
            body = await reply.read()
        # A loaded machine may take longer than one poll.
        if b"try_again" not in body:
            return body


async def step(http: ClientSession, url: str, model_id: str, key: str = "tml-a") -> dict[str, Any]:
    """Run the first step of a model, and return its result."""
    body = {"model_id": model_id, "seq_id": 1, "adam_params": {}}
    status, promise = await Client(http, url, key).post("optim_step", body)
    assert status == 200, promise
    return json.loads(await read_result(http, url, promise["request_id"], key))


def varint(number: int) -> bytes:
    """A number in protobuf's encoding."""
    encoded = b""
    while number > 127:
        encoded += bytes([number & 127 | 128])
        number >>= 7
    return encoded + bytes([number])


def field(number: int, content: bytes) -> bytes:
    """A protobuf field with content of any length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


EMPTY_DATUMS = field(3, b"") * (8 << 20)
BOMBS = {
    "empty datums": EMPTY_DATUMS,
    "empty chunks of one datum": field(3, field(1, b"") * (8 << 20)),
    "cut": field(1, b"model")[:-1],
    "length beyond the end": b"\x1a\xff\xff\xff\xff\x0f",
    "endless number": b"\x10" + b"\xff" * 1000,
    "groups": b"\x1b" * 100_000,
    "field of a newer SDK": field(1, b"model") + field(99, b""),
    "field of a newer SDK's datum": field(3, field(99, b"")),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_protobuf_bomb_is_refused_before_it_is_parsed(tmp_path: Path, name: str) -> None:
    """8 MiB of empty messages took minutes of the event loop, and gigabytes."""
    async with serving(FakeTrainer(), tmp_path, ACCOUNTS) as url, ClientSession() as http:
        ann, bob = Client(http, url, "tml-a"), Client(http, url, "tml-b")
        attack = asyncio.create_task(ann.post("forward_backward", raw=BOMBS[name]))
        _, model_id = await make_model(bob)
        assert "metrics" in await step(http, url, model_id, "tml-b")
        status, reply = await attack
        assert status == 400 and "body" in reply["error"]


def test_a_large_call_of_the_sdk_is_no_bomb() -> None:
    message = wire.load_messages().ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(1024):
        datum = message.data.add()
        for _ in range(20):
            datum.model_input.add().encoded_text.tokens = b"1234" * 20
        for name in ("target_tokens", "weights"):
            datum.loss_fn_inputs[name].dense = b"12345678"
    assert len(wire.parse_training_call(message.SerializeToString()).data) == 1024


DEEP = '{"model_id": ' + "[" * 100_000 + "]" * 100_000 + "}"
NUMBERED = '{"model_id": "MODEL", "seq_id": %s}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("optim_step", DEEP),
        ("optim_step", '{"a":' * 5000 + "1" + "}" * 5000),
        ("optim_step", "[" + "0," * (2 << 20) + "0]"),
        ("optim_step", NUMBERED % "NaN"),
        ("optim_step", NUMBERED % "1e400"),
        ("optim_step", NUMBERED % ("9" * 5000)),
        ("optim_step", NUMBERED % '"x"'),
        ("optim_step", NUMBERED % "null"),
        ("optim_step", '{"model_id": ["MODEL"], "seq_id": 1}'),
        ("optim_step", '{"model_id": "\\ud800", "seq_id": 1}'),
        ("create_model", '{"session_id": "SESSION", "model_seq_id": -1, "base_model": "x"}'),
        ("create_model", '{"session_id": "SESSION", "model_seq_id": 1e99, "base_model": "x"}'),
        ("asample", '{"sampling_session_id": "x", "seq_id": -1}'),
        ("asample", '{"sampling_session_id": "x", "seq_id": 0, "num_samples": 1000000000}'),
        ("retrieve_future", '{"request_id": {"a": 1}}'),
        ("weights_info", '{"tinker_path": "tinker://../../../etc/passwd"}'),
        ("weights_info", '{"tinker_path": "tinker://a:train:0/weights/..%2f..%2fx"}'),
        ("create_session", '{"user_metadata": {"a": "' + "x" * 100_000 + '"}}'),
    ],
)
async def test_hostile_json_gets_a_status_without_retries(tmp_path: Path, path: str, body: str) -> None:
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        session_id, model_id = await make_model(client)
        raw = body.replace("MODEL", model_id).replace("SESSION", session_id).encode()
        status, reply = await client.post(path, raw=raw)
        assert 400 <= status < 500 and status not in (402, 408, 409, 429) and reply["error"], (status, reply)
        assert "metrics" in await step(http, url, model_id), "no number was used"


@pytest.mark.parametrize("number", [-1, 0, 2**31 - 1, -(2**31)])
async def test_a_number_out_of_range_fails_its_promise(tmp_path: Path, number: int) -> None:
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        reply = await client.result("optim_step", {"model_id": model_id, "seq_id": number, "adam_params": {}})
        assert reply["category"] == "user" and "next request" in reply["error"]
        message = wire.load_messages().ForwardBackwardRequest(model_id=model_id, seq_id=number, loss_fn="cispo")
        status, promise = await client.post("forward_backward", raw=message.SerializeToString())
        assert status == 200
        reply = json.loads(await read_result(http, url, promise["request_id"]))
        assert reply["category"] == "user"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
async def test_numbers_that_are_not_finite_fail_their_promise(tmp_path: Path, value: float) -> None:
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        for seq_id, name in enumerate(("learning_rate", "beta1", "eps", "weight_decay", "grad_clip_norm"), 1):
            body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {name: value}}
            reply = await client.result("optim_step", body)
            assert reply["category"] == "user" and name in reply["error"]


async def test_an_unknown_setting_of_a_step_is_refused_unless_it_is_null(tmp_path: Path) -> None:
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        body = {"model_id": model_id, "adam_params": {"amsgrad": True}}
        reply = await client.result("optim_step", body | {"seq_id": 1})
        assert reply["category"] == "user" and "amsgrad = True is not supported" in reply["error"]
        body["adam_params"] = {"amsgrad": None, "type": "adamw"}
        assert "metrics" in await client.result("optim_step", body | {"seq_id": 2})


NEW_MODEL: dict[str, Any] = {"session_id": "s", "model_seq_id": 0, "base_model": "m"}
SAMPLED: dict[str, Any] = {
    "sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "required", "values", "field"),
    [
        (CreateModel, NEW_MODEL, {"lora_config": {"rank": 8, "alpha": 64}}, "alpha"),
        (CreateModel, NEW_MODEL, {"optimizer_config": {"type": "adamw", "momentum": 0.9}}, "momentum"),
        (CreateModel, NEW_MODEL, {"dtype": "float32"}, "dtype"),
        (CreateSampler, {"session_id": "s", "sampling_session_seq_id": 0}, {"dtype": "float32"}, "dtype"),
        (LoadWeights, {"path": "p", "optimizer": True}, {"only_layers": [1]}, "only_layers"),
        (OptimStep, {"model_id": "m", "seq_id": 1}, {"optim_params": {"learning_rate": 1.0}}, "optim_params"),
        (SampleRequest, SAMPLED, {"sampling_params": {"min_p": 0.1}}, "min_p"),
        (SampleRequest, SAMPLED, {"logit_bias": {"7": -1}}, "logit_bias"),
        (SampleRequest, SAMPLED, {"prompt": {"chunks": [{"token": [1]}]}}, "token"),
    ],
)
def test_an_unknown_setting_of_results_is_refused(
    kind: type[Any], required: dict[str, Any], values: dict[str, Any], field: str
) -> None:
    read_fields(kind, required | {"type": "sample", "later": None})
    with pytest.raises(UserError, match=rf"^([\w.]+: )?{field} = .* is not supported; leave it out"):
        read_fields(kind, required | values)


@pytest.mark.parametrize(
    ("kind", "required", "values", "field"),
    [
        (CreateModel, NEW_MODEL, {"lora_config": {"rank": True}}, "lora_config.rank = True"),
        (CreateModel, NEW_MODEL, {"lora_config": {"rank": 8, "train_mlp": "no"}}, "lora_config.train_mlp = 'no'"),
        (OptimStep, {"model_id": "m", "seq_id": 1}, {"adam_params": {"learning_rate": True}}, "learning_rate = True"),
        (OptimStep, {"model_id": "m", "seq_id": 1}, {"adam_params": {"beta1": "0.9"}}, "adam_params.beta1 = '0.9'"),
        (SampleRequest, SAMPLED, {"sampling_params": {"max_tokens": 8.0}}, "sampling_params.max_tokens = 8.0"),
        (SampleRequest, SAMPLED, {"prompt": {"chunks": [{"tokens": [1, "5"]}]}}, "prompt.chunks.0.tokens.1 = '5'"),
        (SampleRequest, SAMPLED, {"num_samples": True}, "num_samples = True"),
    ],
)
def test_a_value_of_another_type_is_refused(
    kind: type[Any], required: dict[str, Any], values: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError, match=re.escape(field)):
        read_fields(kind, required | values)


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "values",
    [
        {"loss_fn": LONG},
        {"loss_fn": "ppo", "loss_fn_config": {LONG: 1.0}},
        {"loss_fn": "cross_entropy", "data": [{"loss_fn_inputs": {LONG: {"dense": bytes(4)}}}]},
        {"loss_fn": "cross_entropy", "data": [{"loss_fn_inputs": {LONG: {"dense": b"1"}}}]},
    ],
)
async def test_a_long_name_is_not_sent_back(tmp_path: Path, values: dict[str, Any]) -> None:
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        message = wire.load_messages().ForwardBackwardRequest(model_id=model_id, seq_id=1, **values)
        for datum in message.data:
            datum.model_input.add().encoded_text.tokens = bytes(4)
            for name in ("target_tokens", "weights"):
                datum.loss_fn_inputs[name].dense = bytes(8)
                datum.loss_fn_inputs[name].dtype = wire.load_messages().DTYPE_INT64
            for tensor in datum.loss_fn_inputs.values():
                tensor.dtype = tensor.dtype or wire.load_messages().DTYPE_FLOAT32
        _, promise = await client.post("forward_backward", raw=message.SerializeToString())
        reply = json.loads(await read_result(http, url, promise["request_id"]))
        assert reply["category"] == "user" and "xxx" in reply["error"] and len(reply["error"]) < 500, reply


async def test_a_too_large_body_of_unknown_length_uses_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("megarl.service.http.routes", "megarl.serving.body"):
        monkeypatch.setattr(f"{module}.MAX_BODY_BYTES", 1 << 16)
    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        _, model_id = await make_model(Client(http, url, "tml-a"))

        async def send() -> AsyncIterator[bytes]:
            yield f'{{"model_id": "{model_id}", "seq_id": 1, "path": "'.encode()
            for _ in range(16):
                yield b"x" * (1 << 14)

        async with http.post(f"{url}/api/v1/save_weights", data=send(), headers={KEY: "tml-a"}) as reply:
            promise = await reply.json()
        result = json.loads(await read_result(http, url, promise["request_id"]))
        assert result == {"error": "the body has more than 65536 bytes", "category": "user"}


async def test_a_body_that_stops_after_its_number_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[asyncio.Timeout] = []
    heads: list[bytearray] = []

    def limit(seconds: float) -> asyncio.Timeout:
        limits.append(asyncio.timeout(None))
        return limits[-1]

    async def read(request: Any, head: bytearray, num_bytes: int) -> None:
        heads.append(head)
        await read_head(request, head, num_bytes)

    async with serving(FakeTrainer(), tmp_path) as url, ClientSession() as http:
        _, model_id = await make_model(Client(http, url, "tml-a"))
        is_answered = asyncio.Event()
        timing = SimpleNamespace(timeout=limit, to_thread=asyncio.to_thread)
        monkeypatch.setattr("megarl.serving.body.asyncio", timing)
        monkeypatch.setattr("megarl.service.http.routes.read_head", read)

        async def send() -> AsyncIterator[bytes]:
            yield f'{{"model_id": "{model_id}", "seq_id": 1, '.encode()
            while not (heads and heads[0]):
                await asyncio.sleep(0)
            # The minute of the body is over.
            limits[0].reschedule(0.0)
            await is_answered.wait()

        async with http.post(f"{url}/api/v1/optim_step", data=send(), headers={KEY: "tml-a"}) as reply:
            promise = await reply.json()
            is_answered.set()
        result = json.loads(await read_result(http, url, promise["request_id"]))
        assert "not complete after 60 seconds" in result["error"] and result["category"] == "user"


async def send_part(url: str, path: str, body: bytes, size: int) -> None:
    """Send the head of a request and a part of its body, then close the connection without reading."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-a\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:size])
    await writer.drain()
    writer.transport.abort()


async def test_clients_that_die_in_mid_request_leave_nothing(tmp_path: Path) -> None:
    """Dead while they send a body, and while they poll: bytes and promises are free, and numbers are unused."""
    trainer = FakeTrainer()
    trainer.seconds = 0.2
    async with serving(trainer, tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        body = json.dumps({"model_id": model_id, "seq_id": 1, "adam_params": {}, "x": "x" * 200_000}).encode()
        await asyncio.gather(*(send_part(url, "optim_step", body, size) for size in range(0, 200_000, 1000)))
        _, promise = await client.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
        poll = json.dumps({"request_id": promise["request_id"]}).encode()
        await asyncio.gather(*(send_part(url, "retrieve_future", poll, len(poll)) for _ in range(100)))
        reply = await read_result(http, url, promise["request_id"])
        assert b"metrics" in reply and trainer.calls.count(("optim_step", model_id)) == 1


async def test_thousands_of_open_futures_are_all_answered(tmp_path: Path) -> None:
    count = 2000

    class WaitingTrainer(FakeTrainer):
        goes_on = asyncio.Event()

        async def sample(self, version: str | None, prompt: Any, settings: Any, seeds: Any) -> Any:
            await self.goes_on.wait()
            return await super().sample(version, prompt, settings, seeds)

    trainer = WaitingTrainer()
    async with serving(trainer, tmp_path) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, session = await client.post("create_session")
        address = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": "Qwen/Qwen3-8B"}
        _, sampler = await client.post("create_sampling_session", address)

        async def submit(number: int) -> str:
            body = {
                "sampling_session_id": sampler["sampling_session_id"], "seq_id": number,
                "sampling_params": {"max_tokens": 1, "seed": number},
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            }  # fmt: skip
            status, promise = await client.post("asample", body)
            assert status == 200, promise
            return promise["request_id"]

        ids = await asyncio.gather(*map(submit, range(count)))
        assert len(set(ids)) == count
        # Another client trains meanwhile.
        _, model_id = await make_model(client)
        assert "metrics" in await step(http, url, model_id)
        trainer.goes_on.set()
        replies = await asyncio.gather(*(read_result(http, url, request_id) for request_id in ids))
        parsed = [wire.load_messages().SampleResponse.FromString(reply) for reply in replies]
        assert all(len(response.sequences) == 1 for response in parsed)
