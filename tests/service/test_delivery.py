"""Requests of a client over a bad network: shuffled, repeated, lost, with lost replies. Each counts once, in order."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, ClientTimeout, web

from megarl.service.messages import wire
from megarl.service.queueing.admission import Admission
from megarl.service.queueing.ledger import GAP_SECONDS, READ_SECONDS, Ledger, Reply, json_reply
from megarl.service.refusals import BusyError
from tests.service.fake_trainer import VOCABULARY, FakeTrainer
from tests.service.served import run_program, serving

Call = tuple[str, dict[str, Any]]
"""Route of a request, and its body without model and number. A body of a training call has its tokens."""
SCHEDULE_SECONDS = 60.0
"""Limit of one schedule. The slowest of 1,000 took 2 s, so only a client that hangs reaches it."""


MAX_BYTES, MAX_PARTS = 1 << 16, 64
"""Limits of the service in these tests: bytes of a body, and parts of a training call."""
REFUSED: list[Call] = [
    ("forward_backward", {"tokens": [1, 2, 3], "weight": 1.0, "num_chunks": MAX_PARTS}),
    ("forward_backward", {"tokens": [1] * (MAX_BYTES // 4), "weight": 1.0}),
    ("save_weights", {"path": "large", "user_metadata": {"text": "x" * MAX_BYTES}}),
    ("save_weights", {"path": "deep", "user_metadata": json.loads('{"a":' * 70 + "1" + "}" * 70)}),
    ("save_weights", {"path": "compressed", "is_compressed": True}),
    ("optim_step", {"adam_params": {}, "is_compressed": True}),
    ("forward_backward", {"tokens": [1, 2, 3], "weight": 1.0, "is_compressed": True}),
]
"""Requests whose bodies cannot be read."""


class Compressed(bytes):
    """A body that is sent with gzip."""


def training_body(model_id: str, number: int, tokens: list[int], weight: float, num_chunks: int = 0) -> bytes:
    """Return the SDK's message of a call with one sequence, and empty chunks behind its tokens."""
    module = wire.load_messages()
    message = module.ForwardBackwardRequest(model_id=model_id, seq_id=number, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    for _ in range(num_chunks):
        datum.model_input.add()
    targets, weights = np.array(tokens[1:], "<i8"), np.full(len(tokens) - 1, weight, "<f4")
    for name, values, kind in (
        ("target_tokens", targets, module.DTYPE_INT64),
        ("weights", weights, module.DTYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), kind
        tensor.shape.append(len(values))
    return message.SerializeToString()


def make_program(draw: random.Random) -> list[Call]:
    """Return the numbered requests of a program: steps of several chunks, saves, and calls that are refused."""
    calls: list[Call] = []
    for step in range(draw.randint(1, 3)):
        for _ in range(draw.randint(1, 4)):
            tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 9))]
            calls.append(("forward_backward", {"tokens": tokens, "weight": draw.choice([0.0, 0.5, 1.0])}))
        if draw.random() < 0.2:
            calls.append(("forward_backward", {"tokens": [1, VOCABULARY], "weight": 1.0}))
        if draw.random() < 0.2:
            calls.append(draw.choice(REFUSED))
        calls.append(("optim_step", {"adam_params": {"learning_rate": draw.choice([0.1, 0.3])}}))
        if draw.random() < 0.4:
            calls.append(("save_weights", {"path": f"step-{step}"}))
    calls.append(("save_weights_for_sampler", {"sampling_session_seq_id": 0}))
    return calls


class Network:
    """A client's side of a network that loses, repeats and delays. Without `draw` it is a good one."""

    def __init__(self, http: ClientSession, url: str, draw: random.Random | None) -> None:
        self._http, self._url, self._draw = http, url, draw

    async def post(self, route: str, body: Any) -> tuple[str, bytes]:
        """Return content type and body of a reply."""
        data: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers = {"X-API-Key": "tml-a"}
        if isinstance(body, Compressed):
            data, headers["Content-Encoding"] = {"data": gzip.compress(body)}, "gzip"
        while True:
            async with self._http.post(f"{self._url}/api/v1/{route}", headers=headers, **data) as reply:
                # The SDK repeats a request with this status.
                if reply.status == 429:
                    continue
                assert reply.status == 200, (route, reply.status, await reply.text())
                return reply.content_type, await reply.read()

    async def status(self, route: str, body: Any) -> int:
        async with self._http.post(f"{self._url}/api/v1/{route}", headers={"X-API-Key": "tml-a"}, json=body) as reply:
            return reply.status

    async def deliver(self, route: str, body: Any) -> dict[str, Any]:
        """Send a request until a reply arrives, as the SDK does. All its replies must have the first promise."""
        if self._draw is None:
            return await self._promise(route, body)
        replies = []
        await asyncio.sleep(self._draw.random() * 0.01)
        while not replies:
            fate = self._draw.choice(["arrives", "is lost", "loses its reply", "is cut", "arrives twice"])
            if fate == "loses its reply":
                await self._promise(route, body)
            if fate == "is cut":
                await self._cut(route, body)
            if fate == "arrives":
                replies = [await self._promise(route, body)]
            if fate == "arrives twice":
                replies = list(await asyncio.gather(*(self._promise(route, body) for _ in range(2))))
        # A copy that was under way for long.
        if self._draw.random() < 0.3:
            replies.append(await self._promise(route, body))
        assert all(reply == replies[0] for reply in replies)
        return replies[0]

    async def result(self, request_id: str) -> tuple[str, bytes]:
        """Poll until a result arrives. It may be read several times, and polls may be cut."""
        body = {"request_id": request_id, "allow_metadata_only": True}
        while self._draw is not None and self._draw.random() < 0.4:
            await self._cut("retrieve_future", body)
        while b"try_again" in (reply := await self.post("retrieve_future", body))[1]:
            pass
        if self._draw is not None and self._draw.random() < 0.3:
            assert await self.post("retrieve_future", body) == reply
        return reply

    async def _promise(self, route: str, body: Any) -> dict[str, Any]:
        return dict(json.loads((await self.post(route, body))[1]))

    async def _cut(self, route: str, body: Any) -> None:
        """Close the connection at some moment of a request."""
        assert self._draw is not None
        task = asyncio.create_task(self.post(route, body))
        await asyncio.wait([task], timeout=self._draw.random() * 0.004)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def run_schedule(
    http: ClientSession, url: str, trainer: FakeTrainer, program: list[Call], draw: random.Random | None
) -> Any:
    """Run a program as a new model. Returns the replies by number, samples, the trainer's calls, and the weights."""
    network = Network(http, url, draw)
    session_id = (await network._promise("create_session", {}))["session_id"]
    body = {
        "session_id": session_id, "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B",
        "lora_config": {"rank": 8, "seed": 3},
    }  # fmt: skip
    created = await network.deliver("create_model", body)
    await network.result(created["request_id"])
    model_id = created["model_id"]

    async def run_call(number: int) -> tuple[str, bytes]:
        route, values = program[number - 1]
        values = dict(values)
        is_compressed = values.pop("is_compressed", False)
        raw: Any = {"model_id": model_id, "seq_id": number} | values
        if route == "forward_backward":
            raw = training_body(model_id, number, **values)
        if is_compressed:
            raw = Compressed(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
        return await network.result((await network.deliver(route, raw))["request_id"])

    numbers = list(range(1, len(program) + 1))
    if draw is None:
        replies = {number: await run_call(number) for number in numbers}
    else:
        draw.shuffle(numbers)
        tasks = {number: asyncio.create_task(run_call(number)) for number in numbers}
        await asyncio.gather(*tasks.values())
        replies = {number: task.result() for number, task in tasks.items()}
    sampler_id = str(json.loads(replies[len(program)][1])["sampling_session_id"])

    async def sample(number: int) -> tuple[str, bytes]:
        asked = {
            "sampling_session_id": sampler_id, "seq_id": number, "num_samples": 2,
            "sampling_params": {"max_tokens": 4, "seed": number},
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        }  # fmt: skip
        promise = await network.deliver("asample", asked)
        assert len(promise["sample_sequence_ids"]) == 2
        return await network.result(promise["request_id"])

    samples = await asyncio.gather(*map(sample, range(3)))
    calls = [name for name, model in trainer.calls if model == model_id]
    logits, gradients = trainer.logits[model_id].copy(), trainer.gradients[model_id].copy()
    await network.post(f"sessions/{session_id}/finish", {})
    without_ids = [
        (kind, raw.replace(model_id.encode(), b"MODEL").replace(sampler_id.encode(), b"SAMPLER"))
        for _, (kind, raw) in sorted(replies.items())
    ]
    return without_ids, list(samples), calls, logits.tobytes(), gradients.tobytes()


async def check_schedules(folder: Path, seeds: range) -> None:
    trainer = FakeTrainer()
    num_refused, num_busy = 0, 0
    read, draw = Admission.count_while_reading, random.Random(7)

    @contextmanager
    def reading(admission: Admission, owner: str, num_bytes: int) -> Iterator[None]:
        """Be busy now and then, as when an account sends too many bytes at once."""
        nonlocal num_busy
        if draw.random() < 0.1:
            num_busy += 1
            raise BusyError("busy")
        with read(admission, owner, num_bytes):
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "count_while_reading", reading)
        patch.setattr("megarl.service.http.routes._SMALL_BYTES", 0)
        patch.setattr("megarl.serving.body.MAX_BODY_BYTES", MAX_BYTES)
        patch.setattr("megarl.service.messages.wire._MAX_PARTS", MAX_PARTS)
        async with serving(trainer, folder) as url, ClientSession(timeout=ClientTimeout(SCHEDULE_SECONDS)) as http:
            for seed in seeds:
                program = make_program(random.Random(seed))
                clean = await run_schedule(http, url, trainer, program, None)
                shuffled = run_schedule(http, url, trainer, program, random.Random(seed))
                assert await asyncio.wait_for(shuffled, SCHEDULE_SECONDS) == clean, seed
                refusals = [number for number, call in enumerate(program) if call in REFUSED]
                assert all(b'"category": "user"' in clean[0][number][1] for number in refusals), seed
                num_refused += len(refusals)
    assert num_refused and num_busy


def test_a_bad_network_changes_no_result(tmp_path: Path) -> None:
    asyncio.run(check_schedules(tmp_path, range(20)))


# Two minutes on a quiet machine. On a busy one the usual limit of five minutes ended it.
@pytest.mark.timeout(1800)
@pytest.mark.long
def test_a_bad_network_changes_no_result_of_a_thousand_schedules(tmp_path: Path) -> None:
    asyncio.run(check_schedules(tmp_path, range(1000)))


@asynccontextmanager
async def bad_proxy(url: str, draw: random.Random) -> AsyncIterator[str]:
    """Forward requests to a service, and lose some of them, some replies, and repeat some requests."""

    async def forward(request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "connection")}
        body, fate = await request.read(), draw.random()
        assert request.transport is not None
        if fate < 0.1:
            request.transport.abort()
        for _ in range(1 + (0.2 < fate < 0.3)):
            async with http.request(request.method, url + request.path_qs, headers=headers, data=body) as reply:
                answer, status, kind = await reply.read(), reply.status, reply.content_type
        if 0.1 < fate < 0.2:
            request.transport.abort()
        return web.Response(body=answer, status=status, content_type=kind)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    async with ClientSession() as http:
        await site.start()
        assert site._server is not None
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        await runner.cleanup()


# Half a minute: the SDK waits between its repetitions.
@pytest.mark.long
async def test_the_sdk_trains_the_same_over_a_bad_network(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with serving(trainer, tmp_path) as url, bad_proxy(url, random.Random(5)) as proxy:
        good, bad = await asyncio.gather(run_program(url, "supervised"), run_program(proxy, "supervised"))
    assert bad.pop("paths") != good.pop("paths")
    assert bad == good
    # Each program has two models: the trained one, and the resumed one.
    trained = {model for name, model in trainer.calls if name == "create"}
    assert len(trained) == 2
    for model in trained:
        names = [name for name, other in trainer.calls if other == model]
        assert names == ["create", *["forward_backward", "optim_step"] * 4, "forward"]


async def test_a_number_that_never_arrives_is_skipped_in_its_turn() -> None:
    """The SDK raises for a request that it could not send, and goes on with the next number."""
    now = [0.0]
    ledger, order = Ledger(report=print, clock=lambda: now[0]), []
    ledger.open_model("m", "owner", lambda reason: order.append(("skipped", reason)))

    def note(number: int) -> Any:
        async def work() -> Reply:
            order.append(("ran", number))
            return json_reply(number=number)

        return work

    promises = {number: ledger.submit("m", number, b"%d" % number, note(number)) for number in (1, 4, 7)}
    for seconds in (GAP_SECONDS - 1, GAP_SECONDS + 1):
        now[0] = seconds
        ledger.expire_results()
    assert await ledger.wait_for(promises[4], 5.0) and not promises[4].is_failed
    assert not promises[7].done.is_set(), "each missing number has the whole time to arrive"
    now[0] = 2 * GAP_SECONDS + 3
    ledger.expire_results()
    assert await ledger.wait_for(promises[7], 5.0)
    skipped = [("skipped", f"request {number} did not arrive") for number in (2, 3, 5, 6)]
    assert order == [("ran", 1), *skipped[:2], ("ran", 4), *skipped[2:], ("ran", 7)]
    late = ledger.submit("m", 5, b"5", note(5))
    assert late.is_failed and late.reply is not None and b"did not arrive" in late.reply.body
    await ledger.close()


async def test_a_late_copy_of_the_first_request_does_not_reset_a_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.service.queueing.ledger.READ_SECONDS", -1.0)
    monkeypatch.setattr("megarl.service.http.routes.EXPIRY_SECONDS", 0.05)
    assert READ_SECONDS > 0
    trainer = FakeTrainer()
    async with serving(trainer, tmp_path) as url, ClientSession() as http:
        network = Network(http, url, None)
        session_id = (await network.deliver("create_session", {}))["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B",
                "lora_config": {"rank": 8}}  # fmt: skip
        promise = await network.deliver("create_model", body)
        await network.result(promise["request_id"])
        # The first promise is forgotten when it is no longer known.
        while (await network.status("retrieve_future", {"request_id": promise["request_id"]})) == 200:
            await asyncio.sleep(0.02)
        copy = await network.deliver("create_model", body)
        assert b"was used by another request" in (await network.result(copy["request_id"]))[1]
        assert [name for name, _ in trainer.calls] == ["create"]
