"""Turns of trainer and engines: what overlaps, what waits, and which adapter leaves its slot."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.service.queueing.turns import TENANT, Turns
from megarl.service.refusals import UserError


class Recorder:
    """Engines that note what the turns ask of them, and check that it is allowed."""

    def __init__(self, num_slots: int, *, is_shared: bool) -> None:
        self.log: list[str] = []
        self.slots: dict[int, str | None] = {}
        self.sampling: list[str | None] = []
        self.training = 0
        self.is_awake = not is_shared
        self.overlapped = False
        self.most_together = 0
        self.turns = Turns(self, is_shared=is_shared, num_slots=num_slots, num_sequences=8)
        self._is_shared = is_shared

    async def free_device(self) -> None:
        assert self._is_shared and not self.sampling and not self.training
        self.is_awake = False
        await asyncio.sleep(0)

    async def wake(self) -> None:
        assert self._is_shared and not self.is_awake and not self.training
        self.is_awake = True
        await asyncio.sleep(0)

    async def load(self, version: str | None, index: int) -> None:
        assert not self.training
        assert self.slots.get(index, "empty") not in self.sampling, "the slot's version is being sampled"
        self.log.append(f"load {version}")
        self.slots.pop(index, None)
        await asyncio.sleep(0)
        self.slots[index], self.is_awake = version, True

    async def train(self, tenant: str, tokens: int = 1, steps: int = 1) -> None:
        TENANT.set(tenant)
        async with self.turns.training_turn(tokens):
            assert not self.training and not (self._is_shared and (self.sampling or self.is_awake))
            self.training += 1
            self.log.append(f"train {tenant}")
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
                    self.overlapped |= bool(self.sampling)
            finally:
                self.training -= 1

    async def sample(self, tenant: str, version: str | None, tokens: int = 1, steps: int = 1) -> None:
        TENANT.set(tenant)
        async with self.turns.sampling_turn(version, tokens=tokens, num_sequences=2) as refund:
            assert self.is_awake and version in self.slots.values()
            self.sampling.append(version)
            self.most_together = max(self.most_together, len(set(self.sampling)))
            self.log.append(f"sample {version}")
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
                    assert version in self.slots.values(), "a version stays while it is sampled"
            finally:
                self.sampling.remove(version)
            refund(tokens - 1)


STEPS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["train", *"uvw"]), st.integers(1, 5)), max_size=25)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, num_slots=st.integers(1, 3), is_shared=st.booleans())
async def test_all_work_runs_and_no_slot_changes_in_use(
    steps: list[tuple[str, str, int]], num_slots: int, is_shared: bool
) -> None:
    engines = Recorder(num_slots, is_shared=is_shared)
    await asyncio.gather(
        *(
            engines.train(tenant, steps=count)
            if kind == "train"
            else engines.sample(tenant, None if kind == "w" else kind, steps=count)
            for tenant, kind, count in steps
        )
    )
    assert len([line for line in engines.log if not line.startswith("load")]) == len(steps)
    assert engines.most_together <= num_slots
    assert not (is_shared and engines.overlapped)


async def test_separate_engines_sample_while_the_trainer_trains_and_shared_ones_do_not() -> None:
    async def both(is_shared: bool) -> bool:
        engines = Recorder(2, is_shared=is_shared)
        await engines.sample("b", "v")
        await asyncio.gather(engines.train("a", steps=50), engines.sample("b", "v", steps=10))
        return engines.overlapped

    assert await both(is_shared=False)
    assert not await both(is_shared=True)


@pytest.mark.parametrize("is_shared", [False, True])
async def test_versions_in_slots_sample_together_and_the_least_recent_one_leaves(is_shared: bool) -> None:
    engines = Recorder(2, is_shared=is_shared)
    await engines.sample("a", "u")
    await engines.sample("a", "v")
    await asyncio.gather(*(engines.sample("a", version, steps=20) for version in "uvuv"))
    assert engines.most_together == 2
    assert [line for line in engines.log if "load" in line] == ["load u", "load v"]
    # Now `u` is used last, so `w` takes the slot of `v`.
    await engines.sample("a", "u")
    await engines.sample("a", "w")
    await engines.sample("a", "u")
    assert [line for line in engines.log if "load" in line] == ["load u", "load v", "load w"]


async def test_a_load_that_waits_for_the_trainer_keeps_no_other_version_waiting() -> None:
    engines = Recorder(2, is_shared=False)
    await engines.sample("a", "u")
    await asyncio.gather(
        engines.train("b", steps=60), engines.sample("a", "new"), *(engines.sample("a", "u") for _ in range(3))
    )
    assert engines.log.index("load new") > engines.log.index("sample u", 3)


async def test_accounts_take_turns_by_tokens() -> None:
    engines = Recorder(1, is_shared=True)
    hog = [engines.train("hog", tokens=9000) for _ in range(6)]
    await asyncio.gather(*hog, *(engines.train("other", tokens=1000) for _ in range(6)))
    assert engines.log.index("train other") <= 2
    assert [line for line in engines.log if "other" in line] == ["train other"] * 6
    assert max(i for i, line in enumerate(engines.log) if "other" in line) <= 8


async def test_work_of_an_ended_session_fails_and_the_next_goes_on() -> None:
    def ended() -> None:
        raise UserError("ended")

    engines = Recorder(1, is_shared=True)
    for _ in range(2):
        with pytest.raises(UserError):
            async with engines.turns.training_turn(1, ended):
                raise AssertionError
        with pytest.raises(UserError):
            async with engines.turns.sampling_turn("gone", tokens=1, num_sequences=1, check=ended):
                raise AssertionError
    await engines.train("a")
    await engines.sample("a", "u")
    # Its version may still be in a slot.
    with pytest.raises(UserError):
        async with engines.turns.sampling_turn("u", tokens=1, num_sequences=1, check=ended):
            raise AssertionError
    await engines.sample("a", "u")


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("num_passes", range(12))
async def test_cancelled_work_gives_back_what_it_took(is_shared: bool, num_passes: int) -> None:
    """Whenever waiting work is cancelled, the trainer and the slots are free for later work."""
    engines = Recorder(1, is_shared=is_shared)
    cancelled = [asyncio.create_task(engines.train("a")), asyncio.create_task(engines.sample("a", "version"))]
    running = asyncio.create_task(engines.train("b", steps=4))
    for _ in range(num_passes):
        await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    await asyncio.gather(running, engines.train("b"), engines.sample("b", "other"))
