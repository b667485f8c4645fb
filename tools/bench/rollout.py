"""The driver and its pumps beside a bare vLLM: the same requests, seeds and settings, in engine steps and CPU seconds.

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
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, metric_line, print_line, versions

from megarl.cluster.local import LocalGroup
from megarl.cluster.worker_group import WorkerGroup
from megarl.config import RolloutConfig
from megarl.config.parallel import ParallelConfig
from megarl.data.chat import load_tokenizer
from megarl.data.dialogue import Dialogue
from megarl.environments import Start, Step, Turn
from megarl.platform import device
from megarl.rewards.calling import Sample
from megarl.rewards.worker import Scored
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import EnginePool
from megarl.types import Completion, Problem, Request, Reward, SamplingSettings, Trajectory

CONTEXT_TOKENS = 2048
NUM_STOP_TOKENS = 8
LEAST = {1: 0.97, 4: 0.90}
MOST_IDLE = 0.05
LONG_LIMIT = 1500


@dataclass(frozen=True)
class Used:
    """What an engine's rank used since it was asked last; `idle` is the share of its time between calls."""

    steps: int
    cpu_seconds: float
    idle: float


class MeasuredEngine:
    """The worker of a rank: an engine of random weights, which counts its steps and can be driven bare."""

    def __init__(self, rank: int, world_size: int, model_path: str, num_slots: int) -> None:
        from safetensors.torch import load_file

        from megarl.engine.engine import RolloutEngine

        device.init_world(600.0)
        config = RolloutConfig(kv_cache_gib=0.5, max_concurrent_requests=num_slots)
        self._own = RolloutEngine(model_path, config, max_model_len=CONTEXT_TOKENS, dtype="float32", seed=3)
        self._own.load_tensors(load_file(f"{model_path}/model.safetensors").items())
        self._engine: Any = self._own._engine
        self._step = self._engine.step
        self._engine.step = self._counted
        self._log: list[Request] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was cached, sent and used."""
        self._own.reset_prefix_cache()
        self._log, self._num_steps = [], 0
        self._busy_seconds, self._first, self._last = 0.0, None, 0.0
        self._cpu_start = time.process_time()

    def advance(
        self, work: tuple[tuple[Request, ...], tuple[str, ...]], budget_seconds: float, leave_after: int | None
    ) -> list[Completion]:
        """As `RolloutEngine.advance`; `work` is (requests, ids to abort)."""
        self._log += work[0]
        start = time.monotonic()
        found = self._own.advance(*work, budget_seconds, leave_after=leave_after)
        self._last = time.monotonic()
        self._first = start if self._first is None else self._first
        self._busy_seconds += self._last - start
        return found

    def used(self) -> Used:
        """What was used since `reset`."""
        span = self._last - (self._first or 0.0)
        idle = 1.0 - self._busy_seconds / span if self._first is not None and span > 0 else 0.0
        return Used(self._num_steps, time.process_time() - self._cpu_start, idle)

    def sent(self) -> list[Request]:
        """The requests since `reset`, in the order in which they came."""
        return self._log

    def bare(self, chains: Sequence[Sequence[Request]]) -> dict[str, list[int]]:
        """Sample chains of requests, each after the one before; token ids by request."""
        from megarl.engine.engine import preserved_random_state, sampling_params

        following = {one.request_id: two for chain in chains for one, two in itertools.pairwise(chain)}
        found: dict[str, list[int]] = {}

        def add(request: Request) -> None:
            prompt = {"type": "token", "prompt_token_ids": request.prompt_token_ids.tolist()}
            self._engine.add_request(request.request_id, prompt, sampling_params(request))

        with preserved_random_state():
            for first, *_ in chains:
                add(first)
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    found[output.request_id] = list(output.outputs[0].token_ids)
                    if output.request_id in following:
                        add(following[output.request_id])
        return found

    def _counted(self) -> Any:
        self._num_steps += 1
        return self._step()

    def close(self) -> None:
        """End the engine."""
        import torch.distributed as dist

        self._own.close()
        dist.destroy_process_group()


class Talk:
    """An environment that answers at once, `num_turns` times."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns

    async def reset(self, problem: Problem, seed: int) -> Start:
        return Start(problem.messages)

    async def step(self, turn: Turn) -> Step:
        if turn.number + 1 == self._num_turns:
            return Step(reward=1.0, done=True)
        return Step(({"role": "user", "content": f"That was answer {turn.number}; add {len(turn.text)} to it."},))

    async def close(self) -> None:
        pass


async def unscored(sample: Sample) -> Scored:
    """A reward at no cost."""
    return Scored(Reward(0.0, format_valid=True, answer_correct=False))


def problems_of(tokenizer: Any, number: int) -> list[Problem]:
    """Problems of a few words each."""
    found = []
    for index in range(number):
        messages = ({"role": "user", "content": f"What is {index} times {index + 7}?"},)
        token_ids = tuple(Dialogue(tokenizer).opening(messages, ()).tolist())
        found.append(Problem(index=index, messages=messages, prompt_token_ids=token_ids, answer="0", record={}))
    return found


class Bench:
    """The driver of some engines."""

    def __init__(self, group: WorkerGroup, tokenizer: Any, options: argparse.Namespace) -> None:
        self._group, self._tokenizer, self._options = group, tokenizer, options
        stops = np.random.default_rng(0).choice(len(tokenizer), NUM_STOP_TOKENS, replace=False)
        self.sampling = SamplingSettings(options.new_tokens, stop_token_ids=tuple(int(token) for token in stops))

    def sampler(self, num_turns: int) -> GroupSampler:
        """The sampler of a run whose environment is `Talk`."""
        world = self._group.world_size
        return GroupSampler(
            pool=EnginePool(self._group, ParallelConfig(1, 1, world, 1), max_running=2 * self._options.slots),
            dialogue=Dialogue(self._tokenizer),
            score=unscored,
            environment="talk",
            make_environment=lambda: Talk(num_turns),
            max_prompt_tokens=CONTEXT_TOKENS - self.sampling.max_new_tokens,
            max_turns=num_turns,
            truncated_turn="close",
        )

    async def driven(self, num_turns: int) -> tuple[Used, list[Trajectory]]:
        """Sample with the driver; what was used, its own CPU seconds included, and the trajectories."""
        problems = problems_of(self._tokenizer, self._options.attempts)
        sampler = self.sampler(num_turns)
        await self._group.call("reset")
        start = time.process_time()
        trajectories = await sampler.sample(problems, self.sampling, seed="bench")
        driver_seconds = time.process_time() - start
        [used] = await self._group.call("used")
        return replace(used, cpu_seconds=used.cpu_seconds + driver_seconds), trajectories

    async def bare(self, chains: Sequence[Sequence[Request]]) -> tuple[Used, dict[str, list[int]]]:
        """Sample the same with a bare engine."""
        await self._group.call("reset")
        [found] = await self._group.call("bare", chains)
        [used] = await self._group.call("used")
        return used, found

    async def chains(self) -> list[list[Request]]:
        """The requests of the last `driven`, by attempt."""
        [sent] = await self._group.call("sent")
        found: dict[str, list[Request]] = {}
        for request in sent:
            found.setdefault(request.request_id.rpartition(".")[0], []).append(request)
        return list(found.values())

    async def idle_share(self) -> float:
        """Of two engines the idle share of that which has not the long request."""
        await self._group.call("reset")
        sampler = self.sampler(4)
        prompt = np.array(problems_of(self._tokenizer, 1)[0].prompt_token_ids, np.int32)
        # Without temperature a random model repeats itself, and never ends by itself.
        long = Request("long", prompt, SamplingSettings(self._options.long_tokens, temperature=0.0), 7)
        going = asyncio.create_task(sampler.pool.generate(long))
        await asyncio.sleep(0)
        await sampler.sample(problems_of(self._tokenizer, self._options.attempts // 4), self.sampling, seed="bench")
        if going.done():
            raise SystemExit("the long request ended before the conversations did: give more --long-tokens")
        used = await self._group.call("used")
        sent = await self._group.call("sent")
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await sampler.pool.drained()
        [other] = [rank for rank, requests in enumerate(sent) if not any(r.request_id == "long" for r in requests)]
        return used[other].idle


async def compare(bench: Bench, num_turns: int, repeats: int) -> dict[str, list[float]]:
    """Engine steps and CPU seconds of the bare loop over those of the driver, of each pair of runs.

    Raises SystemExit where a token differs.
    """
    _, trajectories = await bench.driven(num_turns)
    sampled = sorted(token_ids for trajectory in trajectories for token_ids in _sampled(trajectory))
    chains = await bench.chains()
    await bench.bare(chains)
    ratios: dict[str, list[float]] = {"engine_steps": [], "cpu_seconds": []}
    for repeat in range(repeats):
        if repeat % 2:
            ours, trajectories = await bench.driven(num_turns)
            bare, found = await bench.bare(chains)
        else:
            bare, found = await bench.bare(chains)
            ours, trajectories = await bench.driven(num_turns)
        again = sorted(token_ids for trajectory in trajectories for token_ids in _sampled(trajectory))
        if not sampled == again == sorted(found.values()):
            raise SystemExit("the driver's tokens are not those of the bare engine")
        ratios["engine_steps"].append(bare.steps / ours.steps)
        ratios["cpu_seconds"].append(bare.cpu_seconds / ours.cpu_seconds)
    return ratios


def _sampled(trajectory: Trajectory) -> list[list[int]]:
    """The sampled token ids of each turn."""
    return [
        segment.token_ids[segment.turns == turn].tolist()
        for segment in trajectory.segments
        for turn in np.unique(segment.turns[segment.loss_mask])
    ]


async def run(options: argparse.Namespace) -> bool:
    """Print all lines; whether all targets are met."""
    tokenizer = load_tokenizer(options.model)
    told: dict[str, Any] = {
        "machine": machine(), "versions": versions("vllm"), "attempts": options.attempts, "slots": options.slots,
        "new_tokens": options.new_tokens,
    }  # fmt: skip
    lines = []
    for world_size in options.engines:
        with tempfile.TemporaryDirectory() as logs:
            group = await LocalGroup(world_size).start(
                "rollout:MeasuredEngine",
                {"model_path": str(options.model), "num_slots": options.slots},
                log_folder=Path(logs),
                environment={"OMP_NUM_THREADS": "1"},
            )
            try:
                bench = Bench(group, tokenizer, options)
                if world_size == 1:
                    for num_turns, least in LEAST.items():
                        for unit, values in (await compare(bench, num_turns, options.repeats)).items():
                            lines.append(
                                metric_line(
                                    f"rollout_{num_turns}_turns_{unit}", values, "bare / driven", target=f">= {least}",
                                    against="a loop around vLLM's engine", **told,
                                )
                            )  # fmt: skip
                            print_line(lines[-1])
                else:
                    shares = [await bench.idle_share() for _ in range(options.repeats)]
                    lines.append(
                        metric_line(
                            "rollout_idle_beside_a_long_request", shares, "share of time", target=f"<= {MOST_IDLE}",
                            against="sampling without a pause", long_tokens=options.long_tokens, **told,
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
