"""The leader's executor under vLLM's asynchronous scheduling: the order of steps, and the same completions as without.

On a CPU the platform's veto is lifted; what it gains is a number of a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import RolloutConfig, SamplingConfig
from megarl.tracking.metrics import values
from megarl.types import Completion, ConfigError, ExpertsHandle, Request, SamplingSettings
from tests.engine.steps_ahead import recorded_schedules, recorded_steps, scheduled_ahead
from tests.rank_pool import RankPool

LAYOUTS = [pytest.param(1, 1, id="tp1"), pytest.param(2, 2, id="tp2")]
NEW_TOKENS = 12
CONTEXT = 96
SAMPLINGS = {
    "g": SamplingSettings(NEW_TOKENS, 0.0),
    "s": SamplingSettings(NEW_TOKENS, 0.7),
    "n": SamplingSettings(NEW_TOKENS, 1.3, top_p=0.9, top_k=20),
    "m": SamplingSettings(NEW_TOKENS, 1.3, min_p=0.3),
    "p": SamplingSettings(NEW_TOKENS, 0.7, repetition_penalty=1.5),
}
PROMPTS = [(7, 11, 13), (5, 17), (*range(100, 140), 3), (*range(100, 140), 29)]


def requests(tag: str, sampling: SamplingSettings) -> list[Request]:
    return [Request(f"{tag}{i}", np.array(p, np.int32), sampling, 1000 + i) for i, p in enumerate(PROMPTS)]


class Bench:
    """An engine of this rank with a model folder's weights; after each call no step of it is under way."""

    def __init__(self, model_path: str, **rollout: Any) -> None:
        from safetensors.torch import load_file

        from megarl.engine.engine import RolloutEngine
        from megarl.engine.parts.choice import EngineFeatures

        settings = {"kv_cache_gib": 0.05, "max_concurrent_requests": 32} | rollout
        self.experts: list[np.ndarray] = []
        self.engine = RolloutEngine(
            model_path,
            RolloutConfig.model_validate(settings),
            max_model_len=CONTEXT,
            dtype="float32",
            seed=3,
            features=EngineFeatures(store_experts=self._keep),
        )
        self._weights = load_file(f"{model_path}/model.safetensors")
        self.engine.model.load_weights(self._weights.items())  # pyright: ignore[reportCallIssue]

    def _keep(self, experts: np.ndarray) -> ExpertsHandle:
        self.experts.append(experts)
        return ExpertsHandle(0, len(self.experts) - 1)

    def run(
        self,
        new: Sequence[Request] = (),
        aborts: Sequence[str] = (),
        budget: float = float("inf"),
        leave_after: int | None = None,
    ) -> dict[str, Completion]:
        done = self.engine.advance(new if self.engine.is_leader else (), aborts, budget, leave_after=leave_after)
        assert self.steps_under_way() == 0
        return {completion.request_id: completion for completion in done}

    def steps_under_way(self) -> int:
        if self.engine._requests is None:
            return 0
        core: Any = self.engine._requests.engine.engine_core
        return len(core.engine_core.batch_queue or ())

    def update(self, scale: float) -> None:
        """Other weights: the folder's times `scale`, but for the norms."""
        weights = {name: w if w.dim() == 1 else w * scale for name, w in self._weights.items()}
        self.engine.model.load_weights(weights.items())  # pyright: ignore[reportCallIssue]
        self.engine.weights_updated()


def everything(model_path: str, tp: int, stop_text: str, *, is_ahead: bool) -> dict[str, Any]:
    """Sample on one rank with or without asynchronous scheduling. Only leaders return completions."""
    with scheduled_ahead() if is_ahead else contextlib.nullcontext():
        bench = Bench(
            model_path,
            tp=tp,
            async_scheduling=is_ahead,
            sampling=SamplingConfig(top_p=0.9, top_k=20),
            vllm={"enable_return_routed_experts": True},
        )
        result: dict[str, Any] = {}
        together = [r for tag, sampling in SAMPLINGS.items() for r in requests(tag, sampling)]
        result["together"] = bench.run(together)
        result["metrics"] = values(bench.engine.metrics())
        result["experts"] = {
            name: bench.experts[done.routed_experts.number]
            for name, done in result["together"].items()
            if done.routed_experts
        }

        late: dict[str, Completion] = {}
        for one in together:
            late |= bench.run([one], budget=0.0)
        result["late"] = late | bench.run()

        by_text = requests("t", SamplingSettings(NEW_TOKENS, 0.0, stop=(stop_text,)))
        to_the_end = requests("e", SamplingSettings(CONTEXT - 41, 0.7))
        result["stops"] = bench.run([*by_text, *to_the_end])
        result["early"] = [bench.run(requests("l", SAMPLINGS["s"]), leave_after=1), bench.run()]
        result["prompt"] = bench.engine.prompt_logprobs(np.array(PROMPTS[2]))
        under_way = [bench.steps_under_way()]

        # Half of what runs is parked and goes on as new requests with other weights, the other half stays.
        begun = [r for tag in "snpm" for r in requests(f"{tag}k", SAMPLINGS[tag])]
        bench.run(begun, budget=0.0)
        bench.run(budget=0.0)
        parked = bench.run(aborts=[r.request_id for r in begun[::2]], budget=0.0)
        bench.update(1.5)
        rest = [_rest(r, parked[r.request_id]) for r in begun[::2] if parked]
        result["parked"], result["resumed"] = parked, bench.run(rest)
        result["under_way"] = [*under_way, bench.steps_under_way()]
        bench.engine.sleep()
        bench.engine.wake()
        bench.engine.close()
    return result


def _rest(request: Request, part: Completion) -> Request:
    """Return the request for the rest of a completion."""
    tokens = np.concatenate([request.prompt_token_ids, part.token_ids]).astype(np.int32)
    return Request(f"{request.request_id}+", tokens, request.sampling, request.seed + 1)


def both(model_path: str, tp: int, stop_text: str) -> list[dict[str, Any]]:
    """Without and with asynchronous scheduling."""
    return [everything(model_path, tp, stop_text, is_ahead=is_ahead) for is_ahead in (False, True)]


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(family="qwen3_moe", num_layers=2, num_kv_heads=2, initializer_range=0.1))


@pytest.fixture(scope="module")
def outcome(model_path: str, ranks: RankPool) -> Callable[[int, int], list[dict[str, Any]]]:
    """The leader's two results, by world size and tp."""
    return cache(lambda n, tp: ranks.run(both, model_path, tp, "e", world_size=n)[0])


def same(one: dict[str, Completion], other: dict[str, Completion]) -> None:
    """Whether two engines gave the same."""
    assert one.keys() == other.keys() and one
    for name, completion in one.items():
        found = other[name]
        assert found.token_ids.tolist() == completion.token_ids.tolist(), name
        np.testing.assert_allclose(found.rollout_logprobs, completion.rollout_logprobs, atol=1e-5, rtol=0)
        assert found.weight_versions.tolist() == completion.weight_versions.tolist()
        assert found.finish_reason == completion.finish_reason
        sets = [(c.retained_sets.counts.tolist(), c.retained_sets.token_ids.tolist()) if c.retained_sets else None
                for c in (completion, found)]  # fmt: skip
        assert sets[0] == sets[1]


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_completions_are_those_of_the_synchronous_engine(world_size, tp, outcome) -> None:
    plain, ahead = outcome(world_size, tp)
    for name in ("together", "late", "stops"):
        same(plain[name], ahead[name])
    assert {done.finish_reason for done in ahead["stops"].values()} == {"stop", "length"}
    assert any(done.retained_sets for name, done in ahead["together"].items() if name[0] in "nm")
    np.testing.assert_allclose(ahead["prompt"], plain["prompt"], atol=1e-5, rtol=0)
    assert plain["metrics"]["perf/steps_ahead"] == 0 and ahead["metrics"]["perf/steps_ahead"] > 0.7
    assert ahead["under_way"] == [0, 0]


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_the_experts_of_each_token_are_the_same(world_size, tp, outcome) -> None:
    plain, ahead = (result["experts"] for result in outcome(world_size, tp))
    assert plain.keys() == ahead.keys() and len(plain) == len(SAMPLINGS) * len(PROMPTS)
    for name, experts in plain.items():
        np.testing.assert_array_equal(ahead[name], experts)


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_no_completion_is_lost_when_a_call_leaves_early(world_size, tp, outcome) -> None:
    plain, ahead = (result["early"] for result in outcome(world_size, tp))
    assert ahead[0] and not ahead[0].keys() & ahead[1].keys()
    same(plain[0] | plain[1], ahead[0] | ahead[1])


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_a_token_has_the_version_of_the_weights_that_sampled_it(world_size, tp, outcome) -> None:
    """Steps begun before an update are read before it: the parts end where the synchronous engine's do."""
    plain, ahead = outcome(world_size, tp)
    same(plain["parked"], ahead["parked"])
    same(plain["resumed"], ahead["resumed"])
    assert {len(part.token_ids) for part in ahead["parked"].values()} == {2}
    for name, done in ahead["resumed"].items():
        assert set(done.weight_versions.tolist()) == ({1} if name.endswith("+") else {0})
    assert not any(part.weight_versions.any() for part in ahead["parked"].values())


def order_of_steps(model_path: str, tp: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the steps of one rank for a request of five tokens, alone and aborted after two steps."""
    one = [Request("one", np.array(PROMPTS[0], np.int32), SamplingSettings(5, 0.0), 0)]
    with scheduled_ahead():
        bench = Bench(model_path, tp=tp)
        with recorded_steps(bench.engine) as whole:
            bench.run(one)
        with recorded_steps(bench.engine) as cut:
            bench.run(one, budget=0.0)
            cut.append(("returned", 0))
            bench.run(aborts=["one"])
        bench.engine.close()
    return whole, cut


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_a_step_is_begun_before_the_one_before_it_is_read(world_size, tp, model_path, ranks) -> None:
    leader, *followers = ranks.run(order_of_steps, model_path, tp, world_size=world_size)
    expected = [("scheduled", 0), ("begun", 0)]
    for step in range(1, 5):
        expected += [("scheduled", step), ("begun", step), ("read", step - 1)]
    expected.append(("read", 4))
    assert leader[0] == expected
    # What was begun is read before the call returns, and nothing else is begun for that.
    assert leader[1] == [("scheduled", 0), ("begun", 0), ("read", 0), ("returned", 0)]
    for follower in followers:
        for own, leaders in zip(follower, leader, strict=True):
            assert own == [event for event in leaders if event[0] != "scheduled"]


def little_room(model_path: str) -> list[tuple[dict[str, Completion], float]]:
    """Requests for which the cache has no room at once, without and with asynchronous scheduling."""
    found = []
    for is_ahead in (False, True):
        with scheduled_ahead() if is_ahead else contextlib.nullcontext():
            bench = Bench(model_path, kv_cache_gib=0.0004, async_scheduling=is_ahead)
            done = bench.run(
                [r for tag in "sp" for r in requests(tag, SamplingSettings(50, SAMPLINGS[tag].temperature))]
            )
            num_preempted = values(bench.engine.metrics())["perf/preemptions"]
            found.append((done, num_preempted, *(sample_in_short_steps(bench, is_on=is_on) for is_on in (False, True))))
            bench.engine.close()
    return found


def sample_in_short_steps(bench: Bench, *, is_on: bool) -> dict[str, Any]:
    """Sample with or without the short paths of megarl's scheduler.

    Requests come late, end by stop tokens, stop strings and limits, are aborted and are preempted.
    """
    scheduler = bench.engine._requests._scheduler
    scheduler._has_short_updates = scheduler._has_short_schedules = is_on
    bench.engine.reset_prefix_cache()
    ends = SamplingSettings(50, 1.0, stop_token_ids=tuple(range(300, 312)))
    groups = {
        "s": SamplingSettings(50, 0.7),
        "l": SamplingSettings(54, 1.3),
        "e": ends,
        "t": SamplingSettings(40, 1.0, stop=("e",)),
        "p": SamplingSettings(9, 0.7, repetition_penalty=1.5),
    }
    with recorded_schedules(scheduler) as result:
        completions = bench.run(requests("first", groups["s"])[:1], budget=0.0)
        for tag, sampling in groups.items():
            completions |= bench.run(requests(tag, sampling), budget=0.0)
        completions |= bench.run(aborts=["s1", "e0"], leave_after=3)
        completions |= bench.run(requests("late", groups["l"]))
    assert not scheduler.sampled, "all records are removed"
    # They ended before this workload.
    del result["steps"][0]["finished_req_ids"]
    return {**result, "completions": completions, "preempted": values(bench.engine.metrics())["perf/preemptions"]}


@pytest.fixture(scope="module")
def with_little_room(model_path: str, ranks: RankPool) -> list[Any]:
    return ranks.run(little_room, model_path, world_size=1)[0]


def test_a_request_that_lost_its_place_goes_on_as_it_was(with_little_room) -> None:
    (plain, *_), (ahead, num_preempted, *_) = with_little_room
    assert num_preempted > 0
    same(plain, ahead)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["sync", "ahead"])
def test_short_paths_of_the_scheduler_change_nothing(is_ahead, with_little_room) -> None:
    _, _, whole, short = with_little_room[is_ahead]
    assert len(whole["steps"]) == len(short["steps"])
    for one, other in zip(whole["steps"], short["steps"], strict=True):
        assert one == other
    assert whole["completions"].keys() == short["completions"].keys()
    for name, done in whole["completions"].items():
        found = short["completions"][name]
        assert found.token_ids.tolist() == done.token_ids.tolist(), name
        assert found.rollout_logprobs.tolist() == done.rollout_logprobs.tolist(), name
        assert (found.finish_reason, found.num_cached) == (done.finish_reason, done.num_cached)
        assert len(found.rollout_logprobs) == len(found.token_ids) > 0
    # Every way to end occurs, and most steps are short.
    reasons = {done.finish_reason for done in short["completions"].values()}
    assert reasons == {"stop", "length", "abort"}
    assert short["preempted"] > 0
    assert whole["num_short"] == 0
    # A step has three entries: its plan, and the blocks before and after its output.
    whole_steps = len(whole["steps"]) / 3
    assert 3 * short["num_short"] > whole_steps
    assert whole["num_outputs"] > 2 * short["num_outputs"]


def by_default(model_path: str) -> list[bool | str]:
    """Whether steps are begun ahead by default: with and without recorded sets, and under the platform's veto."""
    found: list[bool | str] = []
    with scheduled_ahead():
        for sampling in (SamplingConfig(), SamplingConfig(top_k=20)):
            bench = Bench(model_path, sampling=sampling)
            found.append(bool(bench.engine._worker.vllm_config.scheduler_config.async_scheduling))
            bench.engine.close()
    bench = Bench(model_path)
    found.append(bool(bench.engine._worker.vllm_config.scheduler_config.async_scheduling))
    bench.engine.close()
    with pytest.raises(ConfigError) as caught:
        Bench(model_path, async_scheduling=True)
    return [*found, str(caught.value)]


@pytest.mark.distributed
def test_the_default_is_what_vllm_has_and_gains_something(model_path) -> None:
    with RankPool(1) as own:  # part of an engine is left behind
        [(plain, recorded, vetoed, error)] = own.run(by_default, model_path)
    assert (plain, recorded, vetoed) == (True, False, False)
    assert error.startswith("rollout.async_scheduling = True: leave it out")
