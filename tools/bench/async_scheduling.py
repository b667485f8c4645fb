"""What vLLM's asynchronous scheduling gains: tokens a second of an engine that decodes, with it over without.

    python tools/bench/async_scheduling.py --model MODEL --tp 2 --requests 256 --new-tokens 512

MODEL is a folder with a config.json; its weights are not read, the engine samples from random ones. Both engines are
given the same requests, as a run gives them: many calls of `advance`, each of which ends with an eighth of what runs.
Needs GPUs: on a CPU vLLM has none of it (`--device cpu` measures the synchronous engine alone). Prints one JSON object
a line: the tokens a second of each, and the ratio with the share of steps that were begun ahead.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import RolloutConfig
from megarl.groups import world
from megarl.tracking.metrics import values
from megarl.types import Request, SamplingSettings
from tools.bench.parts.report import machine, metric_line, print_line, versions
from tools.local_group import LocalGroup

BUDGET_SECONDS = 1.0


@dataclass(frozen=True)
class Round:
    """One pass through all requests."""

    num_tokens: int
    seconds: float
    steps_ahead: float


class DecodingEngine:
    """The worker of a rank: an engine of random weights."""

    def __init__(self, rank: int, world_size: int, model_path: str, is_ahead: bool, options: dict[str, Any]) -> None:
        from megarl.engine.engine import RolloutEngine

        world.initialize(600.0)
        config = RolloutConfig(
            tp=world_size,
            kv_cache_gib=options["kv_cache_gib"],
            max_concurrent_requests=options["requests"],
            async_scheduling=is_ahead,
        )
        context = options["prompt_tokens"] + options["new_tokens"]
        self._engine = RolloutEngine(model_path, config, max_model_len=context, dtype=options["dtype"], seed=3)
        self._options = options

    def sample(self, number: int) -> Round:
        """Sample all requests once. `number` seeds their prompts."""
        options, engine = self._options, self._engine
        generator = np.random.default_rng(number)
        sampling = SamplingSettings(options["new_tokens"])
        prompts = generator.integers(3, 200, (options["requests"], options["prompt_tokens"]), dtype=np.int32)
        new_requests = [Request(f"{number}.{i}", prompt, sampling, i) for i, prompt in enumerate(prompts)]
        engine.metrics()
        num_tokens, num_left, start = 0, len(new_requests), time.perf_counter()
        while num_left:
            leave_after = max(1, num_left // 8)
            # Followers get no requests. They return with their leader, which alone knows when all have ended.
            completions = engine.advance(
                new_requests if engine.is_leader else (), (), BUDGET_SECONDS, leave_after=leave_after
            )
            new_requests = []
            num_tokens += sum(len(completion.token_ids) for completion in completions)
            num_left = _broadcast_from_leader(num_left - len(completions))
        seconds = time.perf_counter() - start
        return Round(num_tokens, seconds, values(engine.metrics()).get("perf/steps_ahead", 0.0))

    def close(self) -> None:
        """End the engine."""
        import torch.distributed as dist

        self._engine.close()
        dist.destroy_process_group()


def _broadcast_from_leader(num_left: int) -> int:
    """Return the leader's number of unfinished requests, on all ranks."""
    import torch
    import torch.distributed as dist

    leaders_number = torch.tensor(num_left)
    dist.broadcast(leaders_number, 0)
    return int(leaders_number)


async def measure_rounds(options: argparse.Namespace, *, is_ahead: bool) -> list[Round]:
    """Return the rounds of an engine. A round before them warms up, and is not counted."""
    settings = {
        name: getattr(options, name) for name in ("kv_cache_gib", "requests", "prompt_tokens", "new_tokens", "dtype")
    }
    with tempfile.TemporaryDirectory() as logs:
        group = await LocalGroup(options.tp).start(
            "tools.bench.async_scheduling:DecodingEngine",
            {"model_path": str(options.model), "is_ahead": is_ahead, "options": settings},
            log_folder=Path(logs),
            environment={"OMP_NUM_THREADS": "1"},
        )
        try:
            rounds = [(await group.call("sample", number))[0] for number in range(options.repeats + 1)]
        finally:
            await group.close()
    return rounds[1:]


async def run(options: argparse.Namespace) -> None:
    """Measure decoding without and with asynchronous scheduling. Print a line for each metric."""
    fields: dict[str, Any] = {
        "machine": machine(), "versions": versions("vllm"), "tp": options.tp, "requests": options.requests,
        "prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens, "model": options.model.name,
    }  # fmt: skip
    speeds: dict[bool, list[float]] = {}
    for is_ahead in (False, True) if options.device == "cuda" else (False,):
        rounds = await measure_rounds(options, is_ahead=is_ahead)
        speeds[is_ahead] = [sampled.num_tokens / sampled.seconds for sampled in rounds]
        name = "decode_asynchronous" if is_ahead else "decode_synchronous"
        steps_ahead = [round(sampled.steps_ahead, 3) for sampled in rounds]
        print_line(
            metric_line(
                name, speeds[is_ahead], "tokens/s", target=None, against="none", steps_ahead=steps_ahead, **fields
            )
        )
    if True in speeds:
        gains = [ahead / plain for ahead, plain in zip(speeds[True], speeds[False], strict=True)]
        print_line(
            metric_line(
                "async_scheduling_gain",
                gains,
                "ratio",
                target="> 1.0",
                against="rollout.async_scheduling false",
                **fields,
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--kv-cache-gib", type=float, default=24.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
