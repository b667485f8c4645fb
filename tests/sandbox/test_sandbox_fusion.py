"""A SandboxFusion server in place of this machine's sandbox: its protocol, its faults, and the reward by it."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from megarl.rewards.functions.code import code
from megarl.sandbox.sandbox import SandboxError, SandboxSettings
from megarl.sandbox.sandbox_fusion import MAX_TRIES, RemoteSandbox, open_sandbox
from megarl.types import ConfigError


@dataclass
class Server:
    """A server that answers POST /run_code as SandboxFusion does, after the given faults."""

    url: str = ""
    faults: list[Any] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.requests.append(asked)
        self.authorizations.append(request.headers.get("Authorization"))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return web.Response(status=fault, text="a fault")
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(fault, dict):
            return web.json_response(fault)
        return web.json_response(await asyncio.to_thread(run, asked))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the program's run in the server's format."""
    result: dict[str, Any] = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "", "stderr": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", asked["code"]],
            input=asked["stdin"],
            capture_output=True,
            text=True,
            timeout=asked["run_timeout"],
        )
        result |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    except subprocess.TimeoutExpired:
        result |= {"status": "TimeLimitExceeded", "return_code": None}
    status = "Success" if result["return_code"] == 0 else "Failed"
    return {
        "status": status,
        "message": "",
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": {},
    }


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/run_code", made.answer)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()


def sandbox_of(server: Server, **given: Any) -> RemoteSandbox:
    return RemoteSandbox(SandboxSettings(url=server.url, **given), sleep=lambda seconds: None)


def test_a_program_runs_there(server: Server) -> None:
    sandbox = sandbox_of(server, memory_mib=256)
    sandbox.start()
    ran = sandbox.run("print(int(input()) * 7)", "11\n", cpu_seconds=20.0)
    assert (ran.outcome, ran.stdout, ran.exit_code, ran.retries) == ("ok", "77\n", 0, 0)
    asked = server.requests[-1]
    assert (asked["language"], asked["stdin"], asked["run_timeout"], asked["memory_limit_MB"]) == (
        "python", "11\n", 20.0, 256,
    )  # fmt: skip


def test_a_password_in_the_address_is_sent_and_never_shown(server: Server) -> None:
    sandbox_of(server).run("print(1)", cpu_seconds=20.0)
    url = server.url.replace("://", "://me:s%40cret@")
    sandbox = RemoteSandbox(SandboxSettings(url=url), sleep=lambda seconds: None)
    sandbox.run("print(1)", cpu_seconds=20.0)
    assert server.authorizations == [None, f"Basic {base64.b64encode(b'me:s@cret').decode()}"]
    server.faults = [422]
    with pytest.raises(SandboxError) as refused:
        sandbox.run("print(1)")
    assert "127.0.0.1" in str(refused.value) and "cret" not in str(refused.value)


def test_ends_of_runs(server: Server) -> None:
    sandbox = sandbox_of(server)
    assert sandbox.run("raise SystemExit(3)", cpu_seconds=20.0).outcome == "error"
    assert sandbox.run("import time\ntime.sleep(60)", cpu_seconds=0.5).outcome == "timeout"
    assert sandbox.run("print('x' * 70_000)", cpu_seconds=20.0).outcome == "output"


@pytest.mark.parametrize(
    "fault",
    [
        500,
        429,
        "drop",
        {"status": "SandboxError", "message": "no pod"},
        {"status": "Success", "message": "", "run_result": None},
    ],
    ids=["500", "429", "dropped", "SandboxError", "no result"],
)
def test_a_fault_of_the_server_is_tried_again_and_counted(server: Server, fault: Any) -> None:
    server.faults = [fault, fault]
    ran = sandbox_of(server).run("print(5)", cpu_seconds=20.0)
    assert (ran.stdout, ran.retries, len(server.requests)) == ("5\n", 2, 3)


def test_tries_end(server: Server) -> None:
    server.faults = [500] * 100
    with pytest.raises(SandboxError, match="HTTP 500"):
        sandbox_of(server).run("print(5)")
    assert len(server.requests) == MAX_TRIES


def test_a_refusal_is_not_tried_again(server: Server) -> None:
    server.faults = [422]
    with pytest.raises(SandboxError, match="422"):
        sandbox_of(server).run("print(5)")
    assert len(server.requests) == 1


def test_the_reward_by_a_server(server: Server) -> None:
    sandbox = sandbox_of(server, packages=())
    cases = {"inputs": ["2 3", "4 5"], "outputs": ["5", "9"]}
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    server.faults = [503]
    reward = code(program, json.dumps(cases), {}, sandbox)
    assert reward.score == 1.0 and reward.metrics["retries"] == 1.0
    calls = {"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "total"}
    assert code("```\ndef total(items): return sum(items)\n```", calls, {}, sandbox).score == 1.0


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://here", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.url"):
        open_sandbox(SandboxSettings(url=url))


def test_a_server_that_is_not_there_is_refused(server: Server) -> None:
    sandbox = RemoteSandbox(SandboxSettings(url="http://127.0.0.1:9"), sleep=lambda _: None)
    with pytest.raises(ConfigError, match=r"sandbox\.url: .* gave no answer"):
        sandbox.start()
