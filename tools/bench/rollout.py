"""The driver and its pumps compared with a bare vLLM on the same requests: engine steps and CPU seconds.

    python tools/make_tiny_model.py --out MODEL --hidden-size 256 --intermediate-size 768 --vocab-size 512
    python tools/bench/rollout.py --model MODEL

Single-turn attempts, and attempts of four turns with an environment that answers at once, by the driver of a run
(`GroupSampler`, `EnginePool`) and an engine on a rank of its own. Beside it, in turns and on the same engine, a loop
that gives vLLM the same prompts with the same seeds, each next one in the moment the one before has ended: it needs no
templates, no seeds, no trajectories. What a step costs is the CPU time of the driver and the rank together.

Then two engines: one has a request of many tokens, and both take conversations. The idle share of the other is the
time that it is not sampling while conversations last. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.chat import load_tokenizer
from megarl.types import Request, SamplingSettings
from tools.bench.parts.driven_engine import Bench, EngineSettings, problems_of
from tools.bench.parts.report import machine, metric_line, print_line, versions
from tools.local_group import LocalGroup

CONTEXT_TOKENS = 2048
NUM_STOP_TOKENS = 8
LEAST = {1: 0.97, 4: 0.90}
MOST_IDLE = 0.05
LONG_LIMIT = 1500


async def idle_share(bench: Bench, tokenizer: Any, options: argparse.Namespace) -> float:
    """Return the idle share of the one of two engines without the long request."""
    await bench.group.call("reset")
    sampler = bench.sampler(4)
    prompt = np.array(problems_of(tokenizer, 1)[0].prompt_token_ids, np.int32)
    # Without temperature a random model repeats itself, and never ends by itself.
    long = Request("long", prompt, SamplingSettings(options.long_tokens, temperature=0.0), 7)
    long_task = asyncio.create_task(sampler.pool.generate(long))
    await asyncio.sleep(0)
    await sampler.sample(problems_of(tokenizer, options.attempts // 4), bench.sampling, seed="bench")
    if long_task.done():
        raise SystemExit("the long request ended before the conversations did: give more --long-tokens")
    used = await bench.group.call("measure_use")
    sent = await bench.group.call("list_requests")
    long_task.cancel()
    await asyncio.gather(long_task, return_exceptions=True)
    await sampler.pool.wait_until_drained()
    [idle_rank] = [rank for rank, requests in enumerate(sent) if not any(r.request_id == "long" for r in requests)]
    return used[idle_rank].idle


async def compare(bench: Bench, num_turns: int, repeats: int) -> dict[str, list[float]]:
    """Return ratios (bare loop / driver) of engine steps and CPU seconds for each pair of runs.

    Raises SystemExit if a token differs.
    """
    ratios: dict[str, list[float]] = {"engine_steps": [], "cpu_seconds": []}
    async for pair in bench.pairs(num_turns, range(repeats)):
        if not pair.first_tokens == pair.driven_tokens == pair.bare_tokens:
            raise SystemExit("the driver's tokens are not those of the bare engine")
        ratios["engine_steps"].append(pair.bare.steps / pair.driven.steps)
        ratios["cpu_seconds"].append(pair.bare.cpu_seconds / pair.driven.cpu_seconds)
    return ratios


async def run(options: argparse.Namespace) -> bool:
    """Print all lines. Returns whether all targets are met."""
    tokenizer = load_tokenizer(options.model)
    fields: dict[str, Any] = {
        "machine": machine(), "versions": versions("vllm"), "attempts": options.attempts, "slots": options.slots,
        "new_tokens": options.new_tokens,
    }  # fmt: skip
    settings = EngineSettings(str(options.model), options.slots, CONTEXT_TOKENS)
    stops = np.random.default_rng(0).choice(len(tokenizer), NUM_STOP_TOKENS, replace=False)
    sampling = SamplingSettings(options.new_tokens, stop_token_ids=tuple(int(token) for token in stops))
    lines = []
    for world_size in options.engines:
        with tempfile.TemporaryDirectory() as logs:
            group = await LocalGroup(world_size).start(
                "tools.bench.parts.driven_engine:MeasuredEngine",
                {"settings": settings},
                log_folder=Path(logs),
                environment={"OMP_NUM_THREADS": "1"},
            )
            try:
                bench = Bench(group, tokenizer, settings, num_attempts=options.attempts, sampling=sampling)
                if world_size == 1:
                    for num_turns, least in LEAST.items():
                        for unit, values in (await compare(bench, num_turns, options.repeats)).items():
                            lines.append(
                                metric_line(
                                    f"rollout_{num_turns}_turns_{unit}", values, "bare / driven", target=f">= {least}",
                                    against="a loop around vLLM's engine", **fields,
                                )
                            )  # fmt: skip
                            print_line(lines[-1])
                else:
                    shares = [await idle_share(bench, tokenizer, options) for _ in range(options.repeats)]
                    lines.append(
                        metric_line(
                            "rollout_idle_beside_a_long_request", shares, "share of time", target=f"<= {MOST_IDLE}",
                            against="sampling without a pause", long_tokens=options.long_tokens, **fields,
                        )
                    )  # fmt: skip
                    print_line(lines[-1])
            finally:
                await group.close()
    return all(line["met"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--engines", type=int, nargs="+", choices=(1, 2), default=(1, 2), help="the parts, as above")
    parser.add_argument("--attempts", type=int, default=128)
    parser.add_argument("--slots", type=int, default=64, help="requests that an engine runs at once")
    parser.add_argument("--new-tokens", type=int, default=192, help="limit of a turn; the median is about 44")
    parser.add_argument("--long-tokens", type=int, default=LONG_LIMIT, help="tokens of the one long request")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if not asyncio.run(run(options)):
        sys.exit("a target is missed")


if __name__ == "__main__":
    main()
