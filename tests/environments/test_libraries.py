"""Environments of other libraries in child processes: reasoning-gym, and a stand-in of GEM that may do anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.environments import Step, Turn
from megarl.environments.gem import Gem
from megarl.environments.libraries.episodes import ForeignEnvironment, NotRepeatedError
from megarl.environments.libraries.library_process import ChildError, ForeignError, check_installed
from megarl.environments.reasoning_gym import ReasoningGym
from megarl.environments.shared import close_shared
from megarl.types import ConfigError, Problem

TOY = """
import os, random, time

class Walk:
    def __init__(self, **config):
        self.config = config
    def reset(self, seed=None):
        random.seed(seed)
        print("noise on standard output", flush=True)
        self.place, self.turns = seed, 0
        return f"at {self.place}", {"suffix": "Say a number."}
    def step(self, text):
        if text == "raise": raise ValueError("no such move")
        if text == "die": os._exit(7)
        if text == "hang": time.sleep(60)
        if text == "fill": self.taken = bytearray(1 << 30)
        if text == "swallow":
            for name in os.listdir("/proc/self/fd"):
                place = f"/proc/self/fd/{name}"
                if os.path.exists(place) and os.readlink(place).startswith("socket"):
                    os.write(int(name), b"not json\\n")
            time.sleep(60)
        if text == "exit": raise SystemExit("done")
        if text == "huge": return "x" * (17 << 20), 0.0, False, False, {}
        if text == "nan": return "", float("nan"), False, False, {}
        self.turns += 1
        self.place += random.randint(0, 10**9)
        if self.config.get("is_different"): self.place = os.getpid()
        return f"at {self.place}", 0.25, self.turns == 3, False, {}
    def close(self):
        if self.config.get("is_unclosable"): raise OSError("not now")

def make(name, **config):
    if name != "walk":
        raise ValueError(f"no environment {name}")
    return Walk(**config)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library `gem` that the children find."""
    (tmp_path / "gem.py").write_text(TOY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_installed.cache_clear()
    yield
    check_installed.cache_clear()


async def played(play: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine, and leave no child."""
    try:
        return await asyncio.wait_for(play(), 60)
    finally:
        await close_shared()


def problem(index: int, **record: str) -> Problem:
    return Problem(index, ({"role": "user", "content": "."},), (1,), "", record)


async def said(environment: ForeignEnvironment, *texts: str) -> list[Step]:
    return [await environment.step(Turn(number, text, "stop")) for number, text in enumerate(texts)]


async def test_a_child_plays_an_episode(toy: None) -> None:
    async def play() -> None:
        walk = Gem("walk")
        start = await walk.reset(problem(7), 0)
        assert [message["content"] for message in start.messages] == ["at 7\nSay a number."]
        steps = await said(walk, "1", "2", "3")
        assert [(step.reward, step.done) for step in steps] == [(0.25, False), (0.25, False), (0.25, True)]
        assert steps[2].answer_correct is False
        other = Gem("walk", seed=1)
        assert await other.reset(problem(7), 0) != start

    await played(play)


async def test_episodes_of_a_child_do_not_share_random_numbers(toy: None) -> None:
    async def play() -> None:
        async def alone(index: int) -> list[Step]:
            walk = Gem("walk", processes=1)
            await walk.reset(problem(index), 0)
            return await said(walk, "1", "2", "3")

        expected = [await alone(index) for index in range(4)]
        assert expected[0] != expected[1]
        assert await asyncio.gather(*(alone(index) for index in range(4))) == expected

    await played(play)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        pytest.param("raise", ForeignError, "ValueError: no such move", id="raises"),
        pytest.param("exit", ForeignError, "SystemExit: done", id="exits"),
        pytest.param("huge", ChildError, "is not valid", id="too large"),
        pytest.param("nan", ForeignError, "ValueError", id="not a number"),
        pytest.param("die", ChildError, "ended with exit code 7: noise on", id="dies"),
        pytest.param("hang", TimeoutError, "within 2 s", id="hangs"),
        pytest.param("swallow", ChildError, "is not valid", id="nonsense"),
    ],
)
async def test_a_faulty_episode_fails_alone(toy: None, text: str, error: type[Exception], words: str) -> None:
    """The other episode of the child is played again in a new one, where it was lost."""

    async def play() -> None:
        faulty, good = (Gem("walk", processes=1, seconds=2.0 if text == "hang" else 30.0) for _ in range(2))
        await faulty.reset(problem(1), 0)
        await good.reset(problem(2), 0)
        before = await said(good, "1")
        with pytest.raises(error, match=words):
            await said(faulty, text)
        after = await said(good, "2", "3")
        whole = Gem("walk", processes=1)
        await whole.reset(problem(2), 0)
        assert [*before, *after] == await said(whole, "1", "2", "3")

    await played(play)


async def test_an_episode_that_cannot_be_closed_fails_no_other(toy: None) -> None:
    async def play() -> None:
        for number in range(2):
            unclosable = Gem("walk", processes=1, config={"is_unclosable": True})
            await unclosable.reset(problem(number), 0)
            await unclosable.close()
        assert (await Gem("walk", processes=1).reset(problem(7), 0)).messages[-1]["content"].startswith("at 7")

    await played(play)


async def test_an_episode_that_does_not_repeat_itself_fails(toy: None) -> None:
    async def play() -> None:
        walk, faulty = (Gem("walk", processes=1, config={"is_different": different}) for different in (True, False))
        await walk.reset(problem(1), 0)
        await said(walk, "1")
        await faulty.reset(problem(2), 0)
        with pytest.raises(ChildError):
            await said(faulty, "die")
        with pytest.raises(NotRepeatedError):
            await said(walk, "2")

    await played(play)


async def test_a_step_that_is_given_up_ends_its_child(toy: None) -> None:
    async def play() -> None:
        hanging, good = Gem("walk", processes=1), Gem("walk", processes=1)
        await hanging.reset(problem(1), 0)
        await good.reset(problem(2), 0)
        step = asyncio.create_task(said(hanging, "hang"))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(said(good, "1"))
        await asyncio.sleep(0)
        step.cancel()
        assert (await asyncio.wait_for(waiting, 30))[0].reward == 0.25
        assert step.cancelled()

    await played(play)


def test_what_cannot_be_made_is_refused(toy: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no environment run"):
        Gem("run").check()
    with pytest.raises(ConfigError, match="cannot be run"):
        Gem("walk", python=str(tmp_path / "absent"))
    Gem("walk").check()


def test_a_missing_package_is_named_with_its_installation() -> None:
    check_installed.cache_clear()
    with pytest.raises(ConfigError, match=r"gem-llm is missing.*uv pip install --python .* gem-llm"):
        Gem("walk")


async def test_the_memory_of_a_child_is_limited(toy: None) -> None:
    with pytest.raises(ConfigError, match=r"takes [0-9]+ MiB of address space"):
        # The check runs an event loop of its own.
        await asyncio.to_thread(Gem("walk", memory_gib=0.001).check)

    async def play() -> None:
        walk = Gem("walk", memory_gib=0.5)
        await walk.reset(problem(1), 0)
        with pytest.raises(ForeignError, match="MemoryError"):
            await said(walk, "fill")
        assert (await said(walk, "1"))[0].reward == 0.25

    await played(play)


async def test_a_task_of_reasoning_gym_is_scored_by_its_own_scorer() -> None:
    async def play() -> None:
        environment = ReasoningGym("chain_sum", config={"min_terms": 2, "max_terms": 2}, system="direct")
        start = await environment.reset(problem(3), 0)
        assert [message["role"] for message in start.messages] == ["system", "user"]
        assert "<answer>" in start.messages[0]["content"]
        question = start.messages[1]["content"]
        left, sign, right = question.partition(": ")[2].removesuffix(" =").split()
        answer = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert (await said(environment, f"so <answer>{answer}</answer>"))[0] == Step((), 1.0, True, True)
        again = ReasoningGym("chain_sum", config={"min_terms": 2, "max_terms": 2})
        assert (await again.reset(problem(3), 1)).messages == start.messages[1:]
        for text in (str(answer), "<answer></answer>", f"<answer>{answer + 1}</answer>"):
            assert (await said(again, text))[0].answer_correct is False
        boxed = ReasoningGym("chain_sum", config={"min_terms": 2, "max_terms": 2}, answer="boxed")
        await boxed.reset(problem(3), 0)
        assert (await said(boxed, f"\\boxed{{{answer}}}"))[0].reward == 1.0

    await played(play)


async def test_what_a_scorer_of_reasoning_gym_would_run_is_not_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    program = f"[open({str(made)!r}, 'w')]"

    async def play() -> None:
        # The scorer of game_of_life_halting evaluates any text as True.
        for task in ("spiral_matrix", "countdown", "game_of_life_halting"):
            environment = ReasoningGym(task)
            await environment.reset(problem(3), 0)
            assert (await said(environment, f"<answer>{program}</answer>"))[0].answer_correct is False

    await played(play)
    assert not made.exists()


async def test_no_question_is_in_training_and_in_validation() -> None:
    async def play() -> None:
        asked: dict[str, set[str]] = {}
        for split, first in (("train", 0), ("validation", 10**9)):
            for index in range(first, first + 40):
                environment = ReasoningGym("chain_sum", config={"max_terms": 2, "max_digits": 1}, processes=1)
                start = await environment.reset(problem(index, split=split), 0)
                asked.setdefault(split, set()).add(start.messages[-1]["content"])
        assert len(asked["train"]) > 20 and len(asked["validation"]) > 20
        assert not asked["train"] & asked["validation"]

    await played(play)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="chain_summ"):
        ReasoningGym("chain_summ").check()
    with pytest.raises(ValueError, match="must be one of"):
        ReasoningGym("chain_sum", answer="bold")  # type: ignore[arg-type]
