"""The client of a model judge counts exactly what a faulty server counts, and uses 90 % of its throughput.

Starts a server in a process of its own, with `--workers` that take `--service-seconds` for an answer each: more than
their quotient a second it cannot give. A share of the calls is answered with 503 or nonsense, or never. Rows compare
the client's counts with the server's, scores with those that were given, calls in flight with 64, and the throughput of
the first nine tenths of the completions with 90 % of the server's limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from megarl.config import RewardConfig
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rewards.scoring.reward_process import worker_settings
from tools.runs import ROOT

DURATION = {"small": "10 s (counts only)", "full": "25 s"}
SMALL = {"completions": 128, "throughput": False, "timeout_seconds": 4.0, "service_seconds": 0.01}
IN_FLIGHT = 64


class FaultyJudge:
    """A server whose faults are drawn by a seed; what it does with a call depends on nothing else."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._random = random.Random(11)
        self._workers = asyncio.Semaphore(given.workers)
        self.counts: Counter[str] = Counter()
        self._in_flight = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.counts["calls"] += 1
        self._in_flight += 1
        self.counts["most_in_flight"] = max(self.counts["most_in_flight"], self._in_flight)
        try:
            return await self._answered(int(re.findall(r"solution (\d+)", body["messages"][-1]["content"])[0]))
        finally:
            self._in_flight -= 1

    async def _answered(self, number: int) -> web.Response:
        drawn = 100 * self._random.random()
        given = self._given
        if drawn < given.errors:
            self.counts["errors"] += 1
            return web.Response(status=503)
        if drawn < given.errors + given.hangs:
            self.counts["timeouts"] += 1
            await asyncio.sleep(3600)  # cancelled when the client goes
        async with self._workers:
            await asyncio.sleep(given.service_seconds)
        is_nonsense = drawn < given.errors + given.hangs + given.nonsense
        self.counts["parse_errors"] += is_nonsense
        self.counts["prompt_tokens"] += number
        said = "hm" if is_nonsense else "CORRECT" if number % 3 else "INCORRECT"
        usage = {"prompt_tokens": number, "completion_tokens": 1}
        return web.json_response({"choices": [{"message": {"content": said}}], "usage": usage})


async def serve(given: argparse.Namespace) -> None:
    """Print the port, serve until standard input has a line, print the counts."""
    judge = FaultyJudge(given)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(judge.counts), flush=True)
    await runner.cleanup()


async def score_all(
    port: int, given: argparse.Namespace
) -> tuple[list[float], list[str | None], dict[str, float], float]:
    """Scores, failures, the client's counts, and the completions a second of the first nine tenths."""
    kwargs = {
        "url": f"http://127.0.0.1:{port}/v1", "model": "judge", "max_in_flight": IN_FLIGHT, "max_tries": given.tries,
        "timeout_seconds": given.timeout_seconds, "pause_seconds": 0.05,
    }  # fmt: skip
    rewards = RewardConfig.model_validate(
        {"functions": [{"name": "judge", "kwargs": kwargs}], "on_failure": "leave_out"}
    )
    pool = RewardPool(worker_settings(rewards), num_workers=1)
    ends: list[float] = []

    async def one(number: int) -> tuple[float, str | None]:
        scored = await pool.score(Sample(f"solution {number}", "42"))
        ends.append(time.perf_counter())
        return scored.reward.score, scored.failure

    started = time.perf_counter()
    try:
        found = await asyncio.gather(*map(one, range(given.completions)))
    finally:
        await pool.aclose()
    most = max(1, 9 * len(ends) // 10)
    return [score for score, _ in found], [why for _, why in found], pool.metrics(), most / (ends[most - 1] - started)


def check(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Score all completions by a server of its own."""
    server = [sys.executable, "-m", "tools.checks.judge", json.dumps(vars(given), default=str)]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin and process.stdout
        try:
            port = int(process.stdout.readline())
            scores, failures, metrics, throughput = asyncio.run(score_all(port, given))
            process.stdin.write("end\n")
            process.stdin.flush()
            counts = Counter(json.loads(process.stdout.readline()))
        finally:
            process.kill()
    counted = {name.removeprefix("reward/judge/"): int(value) for name, value in metrics.items()}
    for name in ("calls", "errors", "timeouts", "parse_errors", "prompt_tokens"):
        yield compare(f"{name} (server's count)", counted[name], counts[name], counted[name] == counts[name])
    expected = [0.0 if why or number % 3 == 0 else 1.0 for number, why in enumerate(failures)]
    num_equal = sum(score == other for score, other in zip(scores, expected, strict=True))
    yield compare("scores as given", num_equal, given.completions, scores == expected)
    faults = counted["errors"] + counted["timeouts"] + counted["parse_errors"]
    answered = counted["retries"] + sum(why is not None for why in failures)
    yield compare("faults (retries and failures)", faults, answered, faults == answered)
    at_once, least = counts["most_in_flight"], min(IN_FLIGHT, given.completions)
    yield compare("calls in flight, at least", at_once, least, at_once >= least or not given.throughput)
    # A call that the server answers with nonsense takes one of its workers as well.
    share = given.nonsense / (100 - given.errors - given.hangs)
    least_throughput = 0.9 * given.workers / given.service_seconds * (1 - share)
    is_fast = throughput >= least_throughput or not given.throughput
    yield compare("completions a second, at least", throughput, least_throughput, is_fast)


def compare(measure: str, value: float, expected: float, met: bool) -> dict[str, Any]:
    return {"measure": f"{measure:30}", "value": value, "expected": expected, "met": met}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--completions", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--service-seconds", type=float, default=0.06)
    parser.add_argument("--timeout-seconds", type=float, default=2.0)
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--errors", type=float, default=5.0, help="percent of calls")
    parser.add_argument("--hangs", type=float, default=5.0, help="percent of calls")
    parser.add_argument("--nonsense", type=float, default=2.0, help="percent of calls")
    parser.add_argument("--throughput", action=argparse.BooleanOptionalAction, default=True, help="check it too")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if options.errors + options.hangs + options.nonsense >= 100:
        raise SystemExit("--errors, --hangs and --nonsense together leave no call with an answer; give less than 100")
    yield from check(options)


if __name__ == "__main__":
    asyncio.run(serve(argparse.Namespace(**json.loads(sys.argv[1]))))
