"""Partial rollouts need at most 1/1.3 of the engine steps and CPU seconds of waiting for the longest completion.

Lengths are given, log-normal, of each problem and attempt; the longest is ten times the median. Both ways sample the
same completions for the same number of steps. Weights change after every step. Engine steps and CPU seconds (engine and
driver) are counted per sample that a step was given; requests that partial rollouts have under way at the end are
charged to them. The last row fails if a log-prob differs by more than 1e-5 from the one under the weights that the
token's version names.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.chat import encode_rendered, load_tokenizer, render
from megarl.data.dialogue import Dialogue
from megarl.environments.single_turn import SingleTurn
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.attempt import Task
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import BufferPolicy
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import EnginePool
from megarl.rollout.source import Source
from megarl.rollout.state import RLState
from megarl.types import Problem, Request, Reward, SamplingSettings, Trajectory
from tools.local_group import LocalGroup
from tools.make_tiny_model import make_tiny_model

DURATION = {"small": "15 s", "full": "130 s"}
SMALL = {"steps": 4, "prompts": 3, "samples": 4, "median": 12, "hidden_size": 128, "layers": 1}

LONGEST = 10
"""Length of the longest attempts over the median: one attempt in a hundred."""
PROMPT_TOKENS = 64
NUM_PROBLEMS = 128
MOST_RATIO = 1 / 1.3
MOST_GAP = 1e-5


@dataclass(frozen=True, slots=True)
class LongTailed(GroupSampler):
    """Attempts of given lengths in tokens [problems, samples]."""

    lengths: NDArray[np.int64] | None = None

    def task(
        self, problem: Problem, group: int, number: int, seed: str, sampling: SamplingSettings, *, prefix: str = ""
    ) -> Task:
        task = GroupSampler.task(self, problem, group, number, seed, sampling, prefix=prefix)
        assert self.lengths is not None
        length = int(self.lengths[problem.index, number])
        return replace(task, sampling=replace(sampling, max_new_tokens=length))


class Engine:
    """The worker: an engine with a model folder's weights, scaled by what a version says; counts its steps."""

    def __init__(self, rank: int, world_size: int, model_path: str, context_tokens: int) -> None:
        from safetensors.torch import load_file

        from megarl.config import RolloutConfig
        from megarl.engine import engine, leader_requests
        from megarl.groups import world

        world.initialize(600.0)
        config = RolloutConfig(tp=1, kv_cache_gib=0.5, max_concurrent_requests=64)
        of_request = leader_requests.sampling_params

        def endless(request: Request) -> Any:
            """Return sampling parameters with which no completion ends before its length."""
            parameters = of_request(request)
            parameters.ignore_eos = True
            return parameters

        leader_requests.sampling_params = endless
        self.engine = engine.RolloutEngine(model_path, config, max_model_len=context_tokens, dtype="float32", seed=3)
        self._model: Any = self.engine.model
        self._weights = load_file(f"{model_path}/model.safetensors")
        self._num_steps = 0
        requests = self.engine._requests
        assert requests is not None
        vllm: Any = requests.engine
        step = vllm.step

        def count_step() -> Any:
            self._num_steps += 1
            return step()

        vllm.step = count_step

    def advance(self, work: Any, budget_seconds: float, leave_after: int) -> list[Any]:
        new, aborts = work
        return self.engine.advance(new, aborts, budget_seconds, leave_after=leave_after)

    def update(self, version: int) -> None:
        """Load a version's weights and set the engine's version."""
        scale = 1.0 - 0.004 * (version % 5)
        weights = {name: w if w.dim() == 1 else w * scale for name, w in self._weights.items()}
        self._model.load_weights(weights.items())
        self.engine.weights_updated()
        self.engine.weight_version = version

    def logprobs(self, token_ids: list[int]) -> NDArray[np.float32] | None:
        return self.engine.prompt_logprobs(np.array(token_ids, np.int64))

    def read_costs(self) -> tuple[int, float]:
        """Steps of the engine and CPU seconds of this process so far."""
        return self._num_steps, time.process_time()


async def by_length(sample: Sample) -> Scored:
    return Scored(Reward(float(len(sample.completion_text)), True, False))


async def sample_steps(
    ranks: WorkerGroup,
    tokenizer: Any,
    problems: Sequence[Problem],
    lengths: NDArray[np.int64],
    options: argparse.Namespace,
    stragglers: str,
) -> tuple[list[Trajectory], float, float]:
    """Sample all steps. Returns trajectories, engine steps a sample, and CPU seconds a sample."""
    partial: dict[str, Any] = (
        {"oversampling": options.oversampling, "importance_sampling": "tis"} if stragglers == "park" else {}
    )
    train = {"prompts_per_step": options.prompts, "samples_per_prompt": options.samples}
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}, "train": train,
            "algorithm": partial,
            "rollout": {"stragglers": stragglers, "sampling": {"max_new_tokens": int(lengths.max())}},
        }
    )  # fmt: skip
    pool = EnginePool(ranks, ParallelConfig(1, 1, 1, 1), max_running=64, budget_seconds=0.05)
    sampler = LongTailed(
        pool, Dialogue(tokenizer), by_length, "single_turn", SingleTurn, PROMPT_TOKENS, lengths=lengths
    )
    state = RLState(recipe.algorithm)
    source = Source("single_turn", 1.0, recipe, sampler, [replace(p, source="single_turn") for p in problems])
    buffer = GroupBuffer(recipe, [source], state, BufferPolicy.from_recipe(recipe))
    [(steps, cpu)] = await ranks.call("read_costs")
    driver = time.process_time()
    trajectories: list[Trajectory] = []
    for version in range(1, options.steps + 1):
        await ranks.call("update", version)
        pool.resume()
        for group in await buffer.take(options.prompts, version):
            trajectories += group
        await pool.pause()
    [(last_steps, last_cpu)] = await ranks.call("read_costs")
    cpu_seconds = last_cpu - cpu + time.process_time() - driver
    await buffer.aclose()
    return trajectories, (last_steps - steps) / len(trajectories), cpu_seconds / len(trajectories)


async def largest_gap(ranks: WorkerGroup, trajectories: Sequence[Trajectory]) -> float:
    """Return the largest error of a recorded log-prob, in nats, by the weights that sampled its token."""
    gap = 0.0
    for version in sorted({int(v) for t in trajectories for v in t.segments[0].weight_versions if v >= 0}):
        await ranks.call("update", version)
        for segment in (segment for trajectory in trajectories for segment in trajectory.segments):
            is_own = segment.weight_versions == version
            if is_own.any():
                [logprobs] = await ranks.call("logprobs", segment.token_ids.tolist())
                gap = max(gap, float(np.abs(logprobs - segment.rollout_logprobs)[is_own].max()))
    return gap


async def measure(options: argparse.Namespace, model_path: Path, logs: Path) -> dict[str, Any]:
    """Measure both ways: lengths, engine steps, CPU seconds, and the errors of partial rollouts' log-probs."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(options.median), 1.0, (NUM_PROBLEMS, options.samples))
    lengths = np.clip(drawn, 1, LONGEST * options.median).astype(np.int64)
    tokenizer = load_tokenizer(str(model_path))
    problems = []
    for index in range(NUM_PROBLEMS):
        messages = ({"role": "user", "content": f"Problem {index}."},)
        prompt = tuple(encode_rendered(tokenizer, render(tokenizer, messages, generation_prompt=True)))
        problems.append(Problem(index, messages, prompt, "7"))
    ranks = await LocalGroup(1).start(
        "tools.checks.partial:Engine",
        {"model_path": str(model_path), "context_tokens": LONGEST * options.median + PROMPT_TOKENS},
        log_folder=logs,
        environment={"OMP_NUM_THREADS": "1"},
    )
    try:
        waited, wait_steps, wait_cpu = await sample_steps(ranks, tokenizer, problems, lengths, options, "wait")
        parked, park_steps, park_cpu = await sample_steps(ranks, tokenizer, problems, lengths, options, "park")
        gap = await largest_gap(ranks, parked)
    finally:
        await ranks.close()
    return {
        "lengths": _lengths(waited),
        "parked_lengths": _lengths(parked),
        "share_of_several_versions": float(np.mean([len(set(_versions(t))) > 1 for t in parked])),
        "engine_steps": {"wait": wait_steps, "park": park_steps, "ratio": park_steps / wait_steps},
        "cpu_seconds": {"wait": wait_cpu, "park": park_cpu, "ratio": park_cpu / wait_cpu},
        "largest_gap": gap,
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model_path = make_tiny_model(
            f"{folder}/model",
            hidden_size=options.hidden_size,
            intermediate_size=2 * options.hidden_size,
            num_layers=options.layers,
        )
        report = asyncio.run(measure(options, model_path, Path(folder, "logs")))
    for title in ("engine_steps", "cpu_seconds"):
        values = report[title]
        yield {"measure": title, **values, "limit": MOST_RATIO, "met": values["ratio"] <= MOST_RATIO}
    for title in ("median", "mean", "max"):
        wait, park = (report[name][title] for name in ("lengths", "parked_lengths"))
        yield {"measure": f"{title} length", "wait": wait, "park": park}
    yield {"measure": "share of several versions", "park": report["share_of_several_versions"]}
    gap = report["largest_gap"]
    yield {"measure": "largest difference of log-probs", "park": gap, "limit": MOST_GAP, "met": gap <= MOST_GAP}


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    lengths = [trajectory.num_sampled for trajectory in trajectories]
    return {"median": float(np.median(lengths)), "mean": float(np.mean(lengths)), "max": float(max(lengths))}


def _versions(trajectory: Trajectory) -> list[int]:
    return [int(v) for segment in trajectory.segments for v in segment.weight_versions[segment.loss_mask]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--median", type=int, default=100, help="of the lengths, in tokens")
    parser.add_argument("--oversampling", type=float, default=2.0, help="of partial rollouts")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
