"""A service in this process, and programs with the real SDK against it in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from megarl.service.handlers.desk import Desk
from megarl.service.http.accounts import Accounts
from megarl.service.http.routes import make_server
from megarl.service.queueing.admission import QueueLimits
from megarl.service.storage.checkpoints import Checkpoints
from megarl.service.trainer import Trainer

PROGRAM = Path(__file__).with_name("sdk_program.py")


@asynccontextmanager
async def serving(
    trainer: Trainer, folder: Path, accounts: Accounts | None = None, limits: QueueLimits | None = None
) -> AsyncIterator[str]:
    """Serve a trainer, and yield the URL."""
    desk = Desk(trainer, Checkpoints(folder, print), report=print, limits=limits)
    server = make_server(desk, accounts or Accounts(None), max_wait_seconds=2.0)
    url = await server.start("127.0.0.1", 0)
    try:
        yield url
    finally:
        await server.close()


async def run_program(url: str, name: str, base: str = "Qwen/Qwen3-8B", **environment: str) -> dict[str, Any]:
    """Run a program of `sdk_program`, and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), url, name, base, stdout=-1, stderr=-1,
        env={**os.environ, "TINKER_TELEMETRY": "0", "PYTHONWARNINGS": "ignore", **environment},
    )  # fmt: skip
    output, log = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, log.decode()[-3000:]
    return json.loads(output.decode().splitlines()[-1])


def check_sampling(results: dict[str, Any]) -> None:
    """Check what the program `sampling` printed."""
    plain, stopped = results["plain"], results["stopped"]
    assert results["plain after"] == plain
    first, again, other = results["seeds"]
    assert first == again != other and first[0] == plain
    # A stop ends the first time that it occurs, and stays in the completion.
    length = plain.index(plain[2]) + 1
    assert stopped["token"] == [plain[:length], "stop"]
    # Another token of these stops, or the text inside of an earlier token, may come first.
    for label in stopped.keys() - {"nothing", "token"}:
        sampled, reason = stopped[label]
        assert reason == "stop" and sampled == plain[: len(sampled)] and len(sampled) <= length, label
    assert stopped["nothing"] == [plain, "length"]
    # The chosen tokens have the same log-prob where they are among the most likely ones.
    pairs = zip(results["tokens"], results["logprobs"], results["topk"], strict=True)
    for token, logprob, most_likely in pairs:
        numbers = [value for _, value in most_likely]
        assert len(most_likely) == 4 and numbers == sorted(numbers, reverse=True)
        assert abs(dict(most_likely).get(token, logprob) - logprob) < 1e-5
        assert logprob <= numbers[0] + 1e-5
    scores, most_likely = results["prompt_logprobs"], results["topk_prompt_logprobs"]
    assert scores[:3] == most_likely[:3] == [None] * 3 and len(scores) == len(most_likely) == 8
    for score, row in zip(scores[3:], most_likely[3:], strict=True):
        assert len(row) == 3 and score <= row[0][1] + 1e-5
    assert sorted(results["errors"]) == results["refused"]
    assert all("refused" not in text and "Error" in text for text in results["errors"].values()), results["errors"]
    assert "stop: has 65 stops; give at most 64" in results["errors"]["many stops"]
    # The SDK would repeat a request with a status of the server's faults for five minutes.
    assert results["seconds"] < 60, results["errors"]
