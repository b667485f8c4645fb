"""The order of a step of reinforcement learning. A test plays the ranks, the sampling and the saves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.loops import rl
from megarl.loops.step import Step, StepSamples

STEPS = 2
KL_BEFORE, KL_AFTER = 0.1, 0.2


class PlayedRun:
    """A run and its parts, which note in `events` what is asked of them."""

    def __init__(self, *models: str) -> None:
        self.events: list[str] = []
        self.steps: list[Step] = []
        self.models = {name: SimpleNamespace(update=self._update) for name in models}
        self.recipe: Any = SimpleNamespace(data=SimpleNamespace(ptx=None))
        self.remaining_steps = range(1, STEPS + 1)
        self.tracker = SimpleNamespace(phase=lambda name: nullcontext(), notice=self.events.append)
        self.data = SimpleNamespace(tokenizer=None, dropped=None)
        self.origin = SimpleNamespace(position=None)
        self.samples = SimpleNamespace(token_records=self._token_records)
        self.watch = SimpleNamespace(observers=SimpleNamespace(observe_batch=self._observe_batch))
        self.checkpoints = SimpleNamespace(begin_due_saves=self._begin_save)
        self.evaluate: Any = "evaluation"

    def abandon_if_asked(self) -> None:
        self.events.append("abandon if asked")

    async def evaluate_at_start(self, evaluate: object, state: Any) -> None:
        assert evaluate is self.evaluate and state.waiting == ["waits"]
        self.events.append("evaluate at start")

    @asynccontextmanager
    async def step(self, number: int, evaluate: object, state: Any) -> AsyncIterator[Step]:
        assert evaluate is self.evaluate and state.waiting == ["waits"]
        self.steps.append(Step(number))
        yield self.steps[-1]

    @asynccontextmanager
    async def updating(self, step: Step) -> AsyncIterator[None]:
        self.events.append("before updates")
        yield
        self.events.append("after updates")

    async def _update(self, minibatch: str, kl_coefficient: float) -> str:
        self.events.append(f"update {minibatch} at KL {kl_coefficient}")
        return f"updated {minibatch}"

    async def _token_records(self, number: int, groups: object, batch: Any) -> list[str]:
        assert (number, groups) == (batch.version, ["scored"])
        self.events.append("records of tokens")
        return ["record"]

    async def _observe_batch(self, step: Step, samples: StepSamples, batch: Any) -> None:
        assert (step.number, samples.groups, samples.waiting) == (batch.version, ["sampled"], ["waits"])
        # Settings from before the step, though the step has changed them.
        assert samples.kl_coefficient == KL_BEFORE and samples.role_baselines == {"solver": 0.0}
        assert "updated" in step.metrics
        self.events.append("observe")

    async def _begin_save(self, number: int, save: object) -> None:
        assert (number, save) == (self.steps[-1].number, "save")
        self.events.append("save")


class PlayedRollout:
    def __init__(self, run: PlayedRun) -> None:
        self.events = run.events
        self.state = SimpleNamespace(
            waiting=["waits"],
            role_baselines={"solver": 0.0},
            kl_coefficient=KL_BEFORE,
            save="save",
            adapt_kl=self._adapt_kl,
        )
        policy = SimpleNamespace(is_synchronous=True)
        self.buffer = SimpleNamespace(policy=policy, add_old_logprobs=self._add_old_logprobs)

    async def resume(self) -> None:
        self.events.append("resume")

    async def sample(self, step: Step) -> list[str]:
        self.events.append(f"sample {step.number}")
        self.state.kl_coefficient = KL_BEFORE
        self.state.role_baselines["solver"] = 0.0
        return ["sampled"]

    async def _add_old_logprobs(self, groups: list[str], forward: object) -> list[str]:
        assert (groups, forward) == (["sampled"], "forward")
        self.events.append("old log-probs")
        return groups

    def _adapt_kl(self, kl: float, *, num_samples: int) -> dict[str, float]:
        assert (kl, num_samples) == (0.25, 3)
        self.events.append("adapt KL")
        self.state.kl_coefficient = KL_AFTER
        return {"kl/coefficient": KL_AFTER}

    def log_samples(self, step: Step, groups: object, trained_tokens: object) -> None:
        assert (groups, trained_tokens) == (["scored"], ["updated a", "updated b"])
        self.events.append("log samples")

    async def reshard(self, step: Step) -> None:
        self.events.append(f"reshard after {step.number}")

    async def write_samples(self, step: Step, groups: object, token_records: object) -> None:
        assert (groups, token_records) == (["scored"], ["record"])
        self.events.append("write samples")


class PlayedUpdates:
    """Updates with two minibatches."""

    def __init__(self, batch: Any, recipe: Any, number: int, conversations: object) -> None:
        assert batch.version == number and recipe.data.ptx is None and conversations is None
        self.trained_tokens: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def add_update(self, update: str) -> None:
        self.trained_tokens.append(update)

    def add_to(self, outcome: Any) -> None:
        assert outcome.kl == 0.25
        outcome.excess_mismatch = float(len(self.trained_tokens))

    def metrics(self) -> dict[str, float]:
        return {"updated": float(len(self.trained_tokens))}


@pytest.mark.parametrize("has_critic", [False, True], ids=["policy", "policy and critic"])
async def test_a_step_samples_trains_saves_and_sends_its_weights(
    monkeypatch: pytest.MonkeyPatch, has_critic: bool
) -> None:
    run = PlayedRun("policy", *(["critic"] if has_critic else []))
    rollout = PlayedRollout(run)

    @asynccontextmanager
    async def open_rollout(opened: PlayedRun) -> AsyncIterator[PlayedRollout]:
        assert opened is run
        yield rollout
        run.events.append("close")

    async def score_groups(
        groups: object, models: object, recipe: object, *, weight_version: int
    ) -> tuple[Any, Any, Any]:
        assert (groups, models, recipe) == (["sampled"], run.models, run.recipe)
        run.events.append("score")
        return ["scored"], SimpleNamespace(version=weight_version, rewards=[0.0] * 3), {"scored": 1.0}

    def forward_of(policy: object, recipe: object) -> str:
        assert policy is run.models["policy"] and recipe is run.recipe
        return "forward"

    def penalty_kl(batch: Any, recipe: object) -> float:
        assert batch.rewards == [0.0] * 3 and recipe is run.recipe
        return 0.25

    def weigh_batch(batch: Any, recipe: object, number: int, kl: float, baselines: dict[str, float]) -> Any:
        assert batch.version == number and recipe is run.recipe
        run.events.append(f"weigh at KL {kl}")
        baselines["solver"] = 1.0
        return {"weighed": 1.0}

    async def update_critic(batch: Any, critic: object, recipe: object, outcome: object) -> dict[str, float]:
        assert critic is run.models["critic"] and batch.version == run.steps[-1].number
        assert recipe is run.recipe and outcome is run.steps[-1].outcome
        run.events.append("update critic")
        return {"critic/loss": 1.0}

    async def move_reference(models: object, recipe: object, number: int) -> dict[str, float]:
        assert (models, recipe, number) == (run.models, run.recipe, run.steps[-1].number)
        run.events.append("move reference")
        return {}

    async def retain_experts(models: object, recipe: object, state: object) -> dict[str, float]:
        assert (models, recipe, state) == (run.models, run.recipe, rollout.state)
        run.events.append("retain experts")
        return {}

    calls = (
        open_rollout,
        forward_of,
        score_groups,
        penalty_kl,
        weigh_batch,
        update_critic,
        move_reference,
        retain_experts,
    )
    for function in calls:
        monkeypatch.setattr(rl, function.__name__, function)
    monkeypatch.setattr(rl, "PolicyUpdates", PlayedUpdates)
    monkeypatch.setattr(rl, "list_off_policy_warnings", lambda recipe: ["warned"])
    played: Any = run
    await rl.train(played)

    expected = ["warned", "resume", "evaluate at start"]
    for number in range(1, STEPS + 1):
        expected += [
            *(f"sample {number}", "old log-probs", "score", "abandon if asked", f"weigh at KL {KL_BEFORE}"),
            *("records of tokens", "before updates", *(["update critic"] if has_critic else [])),
            *(f"update a at KL {KL_BEFORE}", f"update b at KL {KL_BEFORE}", "after updates", "observe", "log samples"),
            *("adapt KL", "move reference", "retain experts", "save", f"reshard after {number}", "write samples"),
        ]
    assert run.events == [*expected, "close"]
    assert [step.outcome.excess_mismatch for step in run.steps] == [2.0] * STEPS
    logged = {"scored": 1.0, "weighed": 1.0, "updated": 2.0, "kl/coefficient": KL_AFTER}
    assert [step.metrics for step in run.steps] == [logged | ({"critic/loss": 1.0} if has_critic else {})] * STEPS
