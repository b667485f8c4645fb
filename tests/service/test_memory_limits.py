"""Host memory of models: those used least recently move to disk, and what does not fit is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.service.messages.requests import AdamSettings
from megarl.service.ranks.memory_limits import MemoryLimits, RankMemory
from megarl.service.ranks.rank_trainer import RankTrainer
from megarl.service.refusals import UserError
from megarl.types import ConfigError, StorageError
from tests.service.fake_trainer import FakeTrainer


def test_each_host_has_the_room_of_all_its_ranks() -> None:
    ranks = [RankMemory("n1", 100, 10, 4000), RankMemory("n1", 100, 10, 4100), RankMemory("n2", 100, 10, 4000)]
    limits = MemoryLimits(ranks, None)
    # 3/4 of 4,000 bytes hold 15 models of two ranks.
    assert limits.find_full_host(num_models=15, num_copies=0) is None
    full = limits.find_full_host(num_models=15, num_copies=1)
    assert full is not None and (full.host, full.num_bytes, full.model_bytes, full.copy_bytes) == ("n1", 3000, 200, 20)
    limits = MemoryLimits(ranks, 240)
    assert limits.find_full_host(num_models=1, num_copies=2) is None
    assert limits.find_full_host(num_models=1, num_copies=3) is not None
    assert "on n1" in limits.describe()


class Ranks:
    """Two ranks of a host, and an engine pool, that note the calls. Models in `pending` have gradients."""

    is_separate = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.reports: list[str] = []
        self.while_moving: Callable[[], Awaitable[object]] | None = None
        self.pending: set[str] = set()
        self.is_disk_full = False
        self.damaged: set[str] = set()
        """Models whose file on the disk of the second rank cannot be read."""
        self.has_read_fault = False
        """Whether ranks fail to read a checkpoint."""
        self.trainers = self

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        name = method.removeprefix("adapters.")
        if name == "measure_memory":
            return [RankMemory("n1", 100, 10, 10**9)] * 2
        self.calls.append((name, *arguments))
        if name == "move_to_disk":
            if self.while_moving is not None:
                await self.while_moving()
            moved = [] if self.is_disk_full else [model for model in arguments[0] if model not in self.pending]
            return [(moved, "full" if self.is_disk_full else None), (arguments[0], None)]
        if name == "read_back":
            return [None, "file: OSError: damaged" if arguments[0] in self.damaged else None]
        if name in ("load", "publish_folder"):
            return ["file: cut short" if self.has_read_fault else None] * 2
        return [(1.0, True), (1.0, True)]

    async def pause(self, **_: Any) -> None: ...

    def moved(self) -> list[str]:
        """The models that moved to disk since the last look."""
        models = [model for name, *arguments in self.calls if name == "move_to_disk" for model in arguments[0]]
        self.calls.clear()
        return models


def make_trainer(ranks: Any, max_bytes: int) -> RankTrainer:
    return RankTrainer(
        FakeTrainer().served, ranks, ranks, ranks,
        idle_folder=Path("idle"), num_slots=1, num_sequences=8, report=ranks.reports.append, max_bytes=max_bytes,
    )  # fmt: skip


async def start_with_two_of_three_models() -> tuple[Ranks, RankTrainer]:
    """Return ranks and trainer with models b and c in memory, and a on the disk."""
    ranks = Ranks()
    trainer = make_trainer(ranks, 480)
    await trainer.start()
    for name in "abc":
        await trainer.create_model(name, 0)
    assert ranks.moved() == ["a"]
    return ranks, trainer


async def test_models_used_least_recently_move_to_disk() -> None:
    ranks = Ranks()
    trainer = make_trainer(ranks, 480)
    assert "on n1" in await trainer.start()
    for name in "ab":
        await trainer.create_model(name, 0)
    assert ranks.moved() == []
    await trainer.clear_gradients("a")
    await trainer.create_model("c", 0)
    assert ranks.moved() == ["b"]
    # It is there already, so the ranks are not asked again.
    await trainer.move_to_disk(["b"])
    assert ranks.moved() == []
    # Its next call brings it back, and needs the room of another.
    await trainer.clear_gradients("b")
    assert ranks.moved() == ["a"]
    # Four copies fit with two models, and a fifth with one.
    for number in range(4):
        await trainer.publish("b", f"v{number}")
    assert ranks.moved() == []
    await trainer.publish("b", "v4")
    assert ranks.moved() == ["c"]
    await trainer.forget(models=[], versions=[f"v{number}" for number in range(5)])
    await trainer.clear_gradients("c")
    assert ranks.moved() == []


@pytest.mark.parametrize("is_disk_full", [True, False])
async def test_what_does_not_fit_is_refused_and_the_service_goes_on(is_disk_full: bool) -> None:
    ranks = Ranks()
    trainer = make_trainer(ranks, 480)
    await trainer.start()
    for name in "ab":
        await trainer.create_model(name, 0)
    ranks.is_disk_full = is_disk_full
    ranks.pending = set() if is_disk_full else {"a", "b"}
    for _ in range(2):
        with pytest.raises(UserError, match="host memory of the service is full"):
            await trainer.create_model("c", 0)
    with pytest.raises(UserError, match="session ended"):
        await trainer.clear_gradients("c")
    await trainer.optim_step("a", AdamSettings())
    await trainer.forget(models=["b"], versions=[])
    await trainer.create_model("c", 0)
    assert not trainer.failure.done()
    assert ranks.reports == ["a model stays in host memory: full"] * (4 if is_disk_full else 0)


async def test_a_session_that_ends_while_its_call_makes_room_leaves_nothing() -> None:
    ranks, trainer = await start_with_two_of_three_models()
    endings: list[asyncio.Task[None]] = []

    async def end_session() -> None:
        endings.append(asyncio.create_task(trainer.forget(models=["a"], versions=["v"])))
        await asyncio.sleep(0)

    ranks.while_moving = end_session
    # "a" is on the disk, so its call needs the room of another model. Its session ends meanwhile.
    await trainer.publish("a", "v")
    ranks.while_moving = None
    await asyncio.gather(*endings)
    assert len(endings) == 1 and ranks.moved() == ["b"]
    # The room of "a" and of its copy is free again: "d" takes it, and nothing moves.
    await trainer.create_model("d", 0)
    assert ranks.moved() == []


async def test_a_state_that_cannot_be_read_back_fails_its_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no checkpoint: these ranks only note that they load one.
    monkeypatch.setattr("megarl.service.ranks.rank_trainer.check_intact", lambda folder: None)
    ranks, trainer = await start_with_two_of_three_models()
    ranks.damaged = {"a"}
    for _ in range(2):
        with pytest.raises(UserError, match=r"idle/a\) cannot be read now.*load_state_with_optimizer"):
            await trainer.optim_step("a", AdamSettings())
    # The room of another model was taken, and the part that a rank has read is on the disk again.
    assert ranks.moved() == ["b", "a", "a"]
    assert ranks.reports == ["model a stays on the disk: file: OSError: damaged; check this disk"] * 2
    for name in "bc":
        await trainer.optim_step(name, AdamSettings())
    assert not trainer.failure.done()
    # A disk may fail for a while only.
    ranks.damaged.clear()
    await trainer.optim_step("a", AdamSettings())
    await trainer.move_to_disk(["a"])
    ranks.damaged = {"a"}
    # A checkpoint takes the place of the state on the disk.
    await trainer.load("a", tmp_path, with_optimizer=True)
    await trainer.optim_step("a", AdamSettings())
    await trainer.move_to_disk(["a"])
    # Nor is the state on the disk read before a checkpoint replaces it.
    ranks.calls.clear()
    await trainer.load("a", tmp_path, with_optimizer=True)
    await trainer.optim_step("a", AdamSettings())
    assert "read_back" not in [name for name, *_ in ranks.calls]


async def test_a_checkpoint_that_ranks_cannot_read_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.service.ranks.rank_trainer.check_intact", lambda folder: None)
    ranks, trainer = await start_with_two_of_three_models()
    ranks.has_read_fault = True
    for _ in range(5):
        with pytest.raises(StorageError, match="cut short"):
            await trainer.publish_folder(tmp_path, "v")
        with pytest.raises(StorageError, match="cut short"):
            await trainer.load("d", tmp_path, with_optimizer=True)
    assert ranks.moved() == ["b"], "one model made room for the load, and nothing took it"
    with pytest.raises(UserError, match="could not be read into it"):
        await trainer.optim_step("d", AdamSettings())
    await trainer.optim_step("c", AdamSettings())
    assert not trainer.failure.done()


async def test_a_memory_without_room_for_one_model_is_an_error_before_the_start() -> None:
    with pytest.raises(ConfigError, match="--host-memory-gib"):
        await make_trainer(Ranks(), 200).start()
