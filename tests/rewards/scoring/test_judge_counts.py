"""The client of a model judge counts exactly what a faulty server counts, and uses 90 % of its throughput.

A server in a process of its own has workers that take a while for an answer each: more than their quotient a second it
cannot give. A share of the calls is answered with 503 or nonsense, or never.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass

import pytest
from aiohttp import web

from megarl.config import RewardConfig
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rewards.scoring.reward_process import worker_settings
from tools.runs import ROOT

pytestmark = pytest.mark.end_to_end

IN_FLIGHT = 64


@dataclass(frozen=True)
class Setting:
    """Faults in percent of the calls."""

    num_completions: int
    service_seconds: float
    timeout_seconds: float
    workers: int = 12
    errors: float = 5.0
    hangs: float = 5.0
    nonsense: float = 2.0


class FaultyJudge:
    """A server whose faults are drawn by a seed; what it does with a call depends on nothing else."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._random = random.Random(11)
        self._workers = asyncio.Semaphore(setting.workers)
        self.counts: Counter[str] = Counter()
        self._in_flight = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.counts["calls"] += 1
        self._in_flight += 1
        self.counts["most_in_flight"] = max(self.counts["most_in_flight"], self._in_flight)
        try:
            return await self._reply(int(re.findall(r"solution (\d+)", body["messages"][-1]["content"])[0]))
        finally:
            self._in_flight -= 1

    async def _reply(self, number: int) -> web.Response:
        drawn = 100 * self._random.random()
        setting = self._setting
        if drawn < setting.errors:
            self.counts["errors"] += 1
            return web.Response(status=503)
        if drawn < setting.errors + setting.hangs:
            self.counts["timeouts"] += 1
            await asyncio.sleep(3600)  # cancelled when the client goes
        async with self._workers:
            await asyncio.sleep(setting.service_seconds)
        is_nonsense = drawn < setting.errors + setting.hangs + setting.nonsense
        self.counts["parse_errors"] += is_nonsense
        self.counts["prompt_tokens"] += number
        verdict = "hm" if is_nonsense else "CORRECT" if number % 3 else "INCORRECT"
        usage = {"prompt_tokens": number, "completion_tokens": 1}
        return web.json_response({"choices": [{"message": {"content": verdict}}], "usage": usage})


async def serve(setting: Setting) -> None:
    """Print the port, serve until standard input has a line, print the counts."""
    judge = FaultyJudge(setting)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(judge.counts), flush=True)
    await runner.cleanup()


async def score_all(port: int, setting: Setting) -> tuple[list[float], list[str | None], dict[str, float], float]:
    """Scores, failures, the client's counts, and the completions a second of the first nine tenths."""
    kwargs = {
        "url": f"http://127.0.0.1:{port}/v1", "model": "judge", "max_in_flight": IN_FLIGHT, "max_tries": 4,
        "timeout_seconds": setting.timeout_seconds, "pause_seconds": 0.05,
    }  # fmt: skip
    rewards = RewardConfig.model_validate(
        {"functions": [{"name": "judge", "kwargs": kwargs}], "on_failure": "leave_out"}
    )
    pool = RewardPool(worker_settings(rewards), num_workers=1)
    ends: list[float] = []

    async def score(number: int) -> tuple[float, str | None]:
        scored = await pool.score(Sample(f"solution {number}", "42"))
        ends.append(time.perf_counter())
        return scored.reward.score, scored.failure

    started = time.perf_counter()
    try:
        results = await asyncio.gather(*map(score, range(setting.num_completions)))
    finally:
        await pool.aclose()
    num_timed = max(1, 9 * len(ends) // 10)
    throughput = num_timed / (ends[num_timed - 1] - started)
    return [value for value, _ in results], [failure for _, failure in results], pool.metrics(), throughput


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(128, service_seconds=0.01, timeout_seconds=4.0), id="128 completions"),
        pytest.param(
            Setting(4000, service_seconds=0.06, timeout_seconds=2.0), id="4000, throughput", marks=pytest.mark.long
        ),
    ],
)
def test_counts_are_those_of_the_server(setting: Setting) -> None:
    command = [sys.executable, "-m", __name__, json.dumps(asdict(setting))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin and process.stdout
        try:
            port = int(process.stdout.readline())
            scores, failures, metrics, throughput = asyncio.run(score_all(port, setting))
            process.stdin.write("end\n")
            process.stdin.flush()
            counts = Counter(json.loads(process.stdout.readline()))
        finally:
            process.kill()
    client = {name.removeprefix("reward/judge/"): int(value) for name, value in metrics.items()}
    names = ("calls", "errors", "timeouts", "parse_errors", "prompt_tokens")
    assert {name: client[name] for name in names} == {name: counts[name] for name in names}
    assert counts["calls"] >= setting.num_completions
    assert scores == [0.0 if failure or number % 3 == 0 else 1.0 for number, failure in enumerate(failures)]
    # Each fault led to a retry, or was the last of its completion.
    num_failures = sum(failure is not None for failure in failures)
    assert client["errors"] + client["timeouts"] + client["parse_errors"] == client["retries"] + num_failures
    if setting.num_completions > 1000:
        assert counts["most_in_flight"] >= IN_FLIGHT
        # A call that the server answers with nonsense takes one of its workers as well.
        wasted_share = setting.nonsense / (100 - setting.errors - setting.hangs)
        assert throughput >= 0.9 * setting.workers / setting.service_seconds * (1 - wasted_share)


if __name__ == "__main__":
    asyncio.run(serve(Setting(**json.loads(sys.argv[1]))))
