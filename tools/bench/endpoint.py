"""Cost of the agents' endpoint: milliseconds and CPU time added to a completion, and requests a second.

    python tools/bench/endpoint.py --sessions 200 1000 --dialects chat

The endpoint, its sessions, the tokenizer's thread and the journal on disk are those of a run with an agent program. In
place of the engines stands `ImmediatePool`, which returns the same tokens at once. So the time from request to answer
is the endpoint's and the client's. HTTP clients in another process keep one connection a session, each with one request
at a time (`endpoint_clients`). Conversations grow by an answer and a question a turn. No tools, no streams.

Each round has two parts. Paced: `--rate` requests a second of all sessions together. Saturated: each session asks again
as soon as it has its answer. `cpu_ms` is the CPU time of the endpoint's process for each answer; `saturated_client` is
the share of a core that the clients used. Prints one JSON object a line; exits with 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.config import Recipe
from megarl.data.chat import encode_rendered, tokenizer_of
from megarl.platform.imports import disable_collector
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.journal.journal import AttemptJournal
from megarl.rollout.requests.engine_requests import Generates
from megarl.serving.agent.agent_program import agent_program
from megarl.serving.session_sampler import Limits
from megarl.types import Completion, Request, SamplingSettings
from tools.bench.endpoint_clients import MAX_NEW_TOKENS, WIRES, Load, drive_clients
from tools.bench.parts.report import host, metric_line, print_line, versions

CONTEXT_TOKENS = 32_768
TARGET_SESSIONS, TARGET = 200, "<= 5"
"""Up to this number of open sessions, the median of `added_ms` has a target."""
UNITS = {
    "added_ms": "ms", "added_ms_p95": "ms", "cpu_ms": "ms of CPU", "saturated_requests": "requests / s",
    "saturated_cpu_ms": "ms of CPU", "saturated_client": "share of a core",
}  # fmt: skip


class ImmediatePool:
    """A stand-in for the engines (`Generates`), which answers every request at once with the same tokens."""

    seconds_paused = 0.0
    num_begun_tokens = 0

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = np.array(token_ids, np.int64)

    async def generate(self, request: Request, **_: Any) -> Completion:
        num_tokens = len(self._token_ids)
        logprobs, weight_versions = np.full(num_tokens, -0.5, np.float32), np.zeros(num_tokens, np.int32)
        return Completion(request.request_id, self._token_ids, logprobs, "stop", weight_versions)

    def forget(self, affinity: str) -> None:
        """No replica is remembered."""

    def load(self) -> None:
        """There are no engines."""


async def measure(recipe: Recipe, num_sessions: int, load: Load, new_tokens: int, file: Path) -> list[dict[str, float]]:
    """Return the values of each round of the clients, with `file` as the journal.

    Raises SystemExit if a session has not recorded each answer, or counts a fork.
    """
    tokenizer = tokenizer_of(recipe.model)
    text_ids = encode_rendered(tokenizer, "The sum of both numbers is 5. " * new_tokens)
    end_ids = encode_rendered(tokenizer, f"{tokenizer.eos_token}")
    pool: Generates = ImmediatePool([*text_ids[: new_tokens - 1], *end_ids])
    sampling, limits = SamplingSettings(MAX_NEW_TOKENS), Limits(CONTEXT_TOKENS, 1 << 30, idle_seconds=600.0)
    # No attempt ends here: nothing is scored, and the new journal has no problem to find.
    unused, engines = cast("Any", None), cast("Any", pool)
    with closing(AttemptJournal(file, 0, unused)) as journal:
        async with agent_program(recipe, engines, unused, sampling, lambda text: None) as program:
            assert program is not None, "the recipe has an agent program"
            program.runner.endpoint.accept()
            sessions = []
            for number in range(num_sessions):
                engine = AttemptEngine(engines, log=journal.begin(f"attempt {number}", "settings"))
                sessions.append(program.runner.sessions.open("attempt", None, sampling, limits, engine, engine.log))
            urls = [program.runner.endpoint.url_of(session) for session in sessions]
            # Spawned, since a fork would copy the locks of this process's threads.
            with ProcessPoolExecutor(1, get_context("spawn")) as clients:
                running = clients.submit(drive_clients, urls, os.getpid(), load)
                rounds, num_answers = await asyncio.wrap_future(running)
            num_recorded = sum(len(session.answers) for session in sessions)
            num_forks = sum(session.counts["forks"] for session in sessions)
            if num_recorded != num_answers or num_forks:
                raise SystemExit(f"the sessions recorded {num_recorded} of {num_answers} answers, {num_forks} forks")
    return rounds


async def run(options: argparse.Namespace, folder: Path) -> bool:
    """Print the lines of all cases. Returns whether every limit is met."""
    is_met = True
    names = ("rounds", "rate", "seconds", "opening_sentences", "turns")
    settings = {name: getattr(options, name) for name in names}
    fields: dict[str, Any] = {
        "name": "bench", "loop": "rl", "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": "unused", "max_prompt_tokens": CONTEXT_TOKENS - MAX_NEW_TOKENS},
        "rollout": {"environment": "command", "agent": {"command": ["true"]}},
    }  # fmt: skip
    for dialect in options.dialects:
        for num_sessions in options.sessions:
            fields["rollout"] |= {"endpoint": {"max_connections": num_sessions}}
            recipe, file = Recipe.model_validate(fields), folder / f"{dialect}_{num_sessions}.journal"
            rounds = await measure(recipe, num_sessions, Load(dialect, **settings), options.new_tokens, file)
            for name, unit in UNITS.items():
                is_limited = name == "added_ms" and num_sessions <= TARGET_SESSIONS
                line = metric_line(
                    f"endpoint_{name}", [values[name] for values in rounds], unit,
                    target=TARGET if is_limited else None, against="a pool that answers at once", machine=host(),
                    versions=versions("aiohttp"), dialect=dialect, sessions=num_sessions,
                    new_tokens=options.new_tokens, **settings,
                )  # fmt: skip
                is_met &= line["met"] is not False
                print_line(line)
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[200, 1000], help="open sessions")
    parser.add_argument("--dialects", nargs="+", choices=WIRES, default=["chat"])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--rate", type=float, default=200.0, help="paced requests a second of all sessions together")
    parser.add_argument("--seconds", type=float, default=2.0, help="least seconds of each part of a round")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument(
        "--opening-sentences", type=int, default=100, help="sentences of a conversation's first message"
    )
    parser.add_argument("--turns", type=int, default=8, help="answers of a conversation, which then begins again")
    options = parser.parse_args()
    # As `megarl train` does: else collections that scan torch's objects add tenths of a second to single answers.
    with disable_collector():
        from tools.make_tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as name:
        # Made for its tokenizer. No weights are read.
        folder = make_tiny_model(Path(name) / "model", family="qwen3", num_layers=1)
        return 0 if asyncio.run(run(options, folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
