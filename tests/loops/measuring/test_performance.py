"""Throughput, utilisation and memory of a step, by numbers that are typed in."""

from __future__ import annotations

import asyncio
import json
import mmap
import shutil
from collections.abc import Callable
from inspect import iscoroutinefunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.cluster.rank_model import RankModel, Work
from megarl.cluster.ranks.activity import Activity
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.loops.measuring.performance import Performance, peak_memory
from megarl.tracking.metrics import Max, Sum
from megarl.types import TrainingSequence

SECONDS = {
    "time/step_seconds": 10.0, "time/rollout_seconds": 5.0, "time/logprobs_seconds": 1.0, "time/train_seconds": 3.0,
}  # fmt: skip
GIB = 1 << 30


class Ranks:
    """Two ranks that answer what they are given, and what was asked of them."""

    def __init__(self, peaks: tuple[float | None, float | None]) -> None:
        self.world_size, self.asked, self.is_separate, self.trainers = 2, list[str](), False, self
        self._answers: dict[str, list[Any]] = {
            "peak_tflops": [*peaks],
            "__activity__": [
                Activity(9.0, {"advance": 3 * GIB, "policy.update": 5 * GIB, "policy.forward": 2 * GIB}),
                Activity(7.0, {"policy.update": 4 * GIB, "reference.forward": 6 * GIB, "sleep_engine": 9 * GIB}),
            ],
            "engine_metrics": [{"memory/kv_usage": Max(0.5), "perf/preemptions": Sum(3.0)}, {}],
        }

    async def call(self, method: str) -> list[Any]:
        self.asked.append(method)
        return self._answers[method]

    call_engines = call


def measured(peaks: tuple[float | None, float | None] = (None, None), **cluster: float) -> list[dict[str, float]]:
    """The metrics of two steps, in the second of which nothing was trained."""
    recipe = Recipe.model_validate(
        {"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}, "cluster": cluster}
    )
    ranks, work = Ranks(peaks), Work(update_tokens=600, flops=16e12)
    performance = Performance(recipe, ranks, {"policy": SimpleNamespace(work=work)})  # type: ignore[arg-type, dict-item]
    steps = [asyncio.run(performance.measure_step(SECONDS, {"rollout/sampled_tokens": 400.0})) for _ in range(2)]
    assert ranks.asked.count("peak_tflops") == (0 if cluster else 1)
    return steps


async def test_what_was_planned_stands_beside_what_is_measured() -> None:
    recipe = Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}})
    planned = {"train": 7 * GIB, "rollout": 4 * GIB, "checkpoint": GIB}
    models: Any = {"policy": SimpleNamespace(work=Work())}
    ranks: Any = Ranks((None, None))
    step = await Performance(recipe, ranks, models, planned).measure_step(SECONDS, {})
    assert step["memory/train_gib"] == 5.0 and step["memory/train_predicted_gib"] == 7.0
    assert step["memory/rollout_predicted_gib"] == 4.0
    assert "memory/checkpoint_predicted_gib" not in step, "nothing was saved in this step"


def test_a_step_is_measured() -> None:
    first, second = measured()
    assert first == pytest.approx(
        {
            "time/ranks_idle": 0.2,
            "perf/tokens_per_second_per_rank": 30.0,
            "perf/train_tokens_per_second_per_rank": 100.0,
            "perf/rollout_tokens_per_second_per_rank": 40.0,
            "perf/tflops_per_rank": 2.0,
            "memory/rollout_gib": 3.0,
            "memory/logprobs_gib": 6.0,
            "memory/train_gib": 5.0,
            "memory/kv_usage": 0.5,
            "perf/preemptions": 3.0,
        }
    )
    assert "perf/tflops_per_rank" not in second and second["perf/rollout_tokens_per_second_per_rank"] == 40.0


async def test_an_evaluated_step_s_rates_are_over_the_whole_step() -> None:
    recipe = Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}})
    ranks: Any = Ranks((None, None))
    performance = Performance(recipe, ranks, {"policy": SimpleNamespace(work=Work(update_tokens=600))})  # type: ignore[dict-item]
    evaluation, whole_step_metrics = await performance.measure_evaluation({"time/step_seconds": 30.0})
    assert evaluation["memory/train_gib"] == 5.0 and not whole_step_metrics, "an earlier start measured the step"
    await performance.measure_step(SECONDS, {})
    # Ranks are busy for 8 s of the step's 10 s, and for 8 s of the evaluation's 30 s.
    _, whole_step_metrics = await performance.measure_evaluation({"time/step_seconds": 30.0})
    assert whole_step_metrics == pytest.approx({"time/ranks_idle": 0.6, "perf/tokens_per_second_per_rank": 7.5})


async def test_attempts_that_go_on_are_sampled_outside_the_phase_too() -> None:
    rates = []
    for stragglers in ("wait", "park"):
        recipe = Recipe.model_validate(
            {
                "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"},
                "rollout": {"stragglers": stragglers},
            }
        )  # fmt: skip
        performance = Performance(recipe, Ranks((None, None)), {"policy": SimpleNamespace(work=Work())})  # type: ignore[arg-type, dict-item]
        sampled = {"rollout/sampled_tokens": 400.0, "perf/engines_open_seconds": 8.0}
        found = await performance.measure_step(SECONDS, sampled)
        rates.append(found["perf/rollout_tokens_per_second_per_rank"])
    assert rates == [40.0, 25.0]


def test_the_flops_are_of_models_as_the_recipe_has_them(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from megarl.loops.models import make_rank_models

    folder = shutil.copytree(tiny_model(num_layers=2), tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}, "rope_scaling": None}
    (folder / "config.json").write_text(json.dumps(config))
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "data": {"train": "t"}, "algorithm": {"preset": "ppo", "kl_coefficient": 0.1},
            "model": {"path": str(folder), "override_config": {"rope_scaling": None}},
        }
    )  # fmt: skip
    models = make_rank_models(recipe, ParallelConfig(1, 1, 1, 1), Ranks((None, None)))  # type: ignore[arg-type]
    assert models.keys() == {"policy", "reference", "critic"}
    assert [model.shape is not None and model.shape.rotary.scaling for model in models.values()] == ["default"] * 3


async def test_every_call_of_a_model_belongs_to_a_phase() -> None:
    class AskedError(Exception):
        pass

    class Recorder:
        async def scatter(self, method: str, *_: Any) -> None:
            raise AskedError(method)

    parallel = ParallelConfig(1, 1, 1, 1)
    model = RankModel(Recorder(), parallel, 64, name="teacher3")  # type: ignore[arg-type]
    batch = TokenBatch.from_sequences([TrainingSequence(np.arange(4), np.arange(4) > 1)])
    # `gather` calls any method of the ranks by its name.
    methods = {name: call for name, call in vars(RankModel).items() if name[0] != "_" and name != "gather"}
    calls = [name for name, call in methods.items() if iscoroutinefunction(call)]
    assert {"update", "forward"} <= set(calls)
    for name in calls:
        with pytest.raises(AskedError) as asked:
            await getattr(model, name)(batch)
        assert len(peak_memory([Activity(1.0, {str(asked.value): GIB})])) == 1, name


async def test_a_first_step_s_throughput_is_without_the_start() -> None:
    recipe = Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}})
    work = Work()
    performance = Performance(recipe, Ranks((None, None)), {"policy": SimpleNamespace(work=work)})  # type: ignore[arg-type, dict-item]
    await performance.begin_measuring()
    rates = []
    for _ in range(2):
        work.update_tokens = 600
        found = await performance.measure_step(SECONDS, {})
        rates.append(found["perf/tokens_per_second_per_rank"])
    # The 10 seconds that the tracker counts are, of the first step, those since the start of the run.
    assert rates[0] > 100 and rates[1] == 30


@pytest.mark.parametrize(
    ("peaks", "cluster", "mfu"),
    [
        pytest.param((8.0, 5.0), {}, 0.4, id="the slower device counts"),
        pytest.param((8.0, None), {}, None, id="of an unknown device there is none"),
        pytest.param((None, None), {"peak_tflops": 4.0}, 0.5, id="the recipe names it"),
        pytest.param((8.0, 8.0), {"peak_tflops": 4.0}, 0.5, id="the recipe comes first"),
    ],
)
def test_utilisation_is_the_share_of_a_known_peak(
    peaks: tuple[float | None, float | None], cluster: dict[str, float], mfu: float | None
) -> None:
    assert measured(peaks, **cluster)[0].get("perf/mfu") == (mfu and pytest.approx(mfu))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A10G", 125.0),
        ("NVIDIA A1000", None),
        ("Some CPU", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, peak: float | None) -> None:
    from megarl.platform.device import peak_of, peak_tflops

    assert peak_of(name) == peak
    assert peak_tflops("float32") is None


async def test_what_was_before_the_first_step_is_no_step_s() -> None:
    recipe = Recipe.model_validate({"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}})
    ranks, work = Ranks((None, None)), Work(update_tokens=600, flops=16e12)
    performance = Performance(recipe, ranks, {"policy": SimpleNamespace(work=work)})  # type: ignore[arg-type, dict-item]
    await performance.begin_measuring()
    assert work == Work() and ranks.asked == ["__activity__", "engine_metrics"]
    work.update_tokens = 60
    await performance.begin_measuring()
    assert work.update_tokens == 60 and len(ranks.asked) == 2


def test_calls_are_noted_with_the_memory_that_they_took() -> None:
    import torch  # noqa: F401  (a process without it has no memory of interest)

    activity = Activity()
    with activity.record_call("all before"):
        pass
    activity.take()
    with activity.record_call("small"):
        pass
    with activity.record_call("large"), mmap.mmap(-1, 128 << 20) as pages:
        # Not from malloc: it may reuse memory that earlier tests left in the process.
        pages[:: mmap.PAGESIZE] = b"1" * (len(pages) // mmap.PAGESIZE)
    with activity.record_call("small"):
        pass
    taken = activity.take()
    assert taken.peak_bytes["large"] - taken.peak_bytes["small"] > 100 << 20
    assert taken.busy_seconds > 0 and activity.take() == Activity()
