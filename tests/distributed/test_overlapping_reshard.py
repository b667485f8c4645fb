"""Weights that are sent while trainers learn on: engines get those of their version, and the same is learned."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.rank_errors import RankFailedError, RankLostError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.platform import device
from tools.local_group import LocalGroup

pytestmark = pytest.mark.distributed

LAYOUT = ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1, rollout_ranks=2)
VERSIONS = (2, 3, 4, 5, 6)


def recipe_of(model: Path, *, overlap: bool) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "overlapping",
            "loop": "rl",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "unused", "max_prompt_tokens": 32},
            "cluster": {"ranks_per_node": 4},
            "trainer": {"max_tokens_per_microbatch": 64},
            "optimizer": {"learning_rate": 1e-2},
            "lora": {"rank": 4},
            "rollout": {
                "placement": "separate",
                "ranks": 2,
                "max_staleness": 1,
                "kv_cache_gib": 0.05,
                "sampling": {"max_new_tokens": 16},
            },
            # Smaller than the model: several buckets travel.
            "weights": {"bucket_mib": 1, "overlap": overlap},
        }
    )


class Run:
    """Two trainers and two replicas of one rank."""

    def __init__(self, recipe: Recipe, logs: Path, via: str) -> None:
        self._settings: dict[str, Any] = {"via": via, "recipe": recipe, "parallel": LAYOUT}
        self._logs = logs
        self.ranks: RunRanks
        self.reshard_calls: ReshardCalls

    async def __aenter__(self) -> Run:
        trainers, *engines = await asyncio.gather(
            self._started(2, 0, "overlapping_workers:Trainer"), self.engine(0), self.engine(1)
        )
        self.ranks = RunRanks(trainers, engines)
        self.reshard_calls = ReshardCalls(self.ranks)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.ranks.close()

    async def engine(self, replica: int) -> WorkerGroup:
        return await self._started(1, 2 + replica, "overlapping_workers:Engine", replica=replica)

    async def hashes(self) -> list[str]:
        """Return the hash of the weights on each rank that has an engine."""
        return [found for group in self.ranks.replicas for found in await group.call("weights_hash")]

    async def _started(self, size: int, first: int, worker: str, **further: Any) -> WorkerGroup:
        imports = device.forkable_imports("megarl.worker.colocated")
        made = LocalGroup(size, PartOfRun(first, 4, b"k" * 32), imports=imports)
        environment = device.rank_environment(4)
        return await made.start(worker, self._settings | further, log_folder=self._logs, environment=environment)


@pytest.fixture(autouse=True)
def worker_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(num_layers=2)


@pytest.fixture(scope="module")
def in_turn(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], list[str]]:
    """Hashes without overlap: of an engine's weights by version, and of the trainers' in the end."""

    async def play() -> tuple[dict[int, str], list[str]]:
        found = {}
        async with Run(recipe_of(model, overlap=False), tmp_path_factory.mktemp("logs"), "shared memory") as run:
            await run.reshard_calls.run(verify=True, version=1)
            for version in VERSIONS:
                await run.ranks.trainers.call("learn")
                await run.reshard_calls.run(verify=True, version=version)
                [found[version]] = set(await run.hashes())
            await run.ranks.trainers.call("learn")
            return found, await run.ranks.trainers.call("weights_hash")

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        return asyncio.run(play())


@pytest.mark.parametrize("via", [pytest.param("shared memory", marks=pytest.mark.long), "gloo"])
async def test_each_version_is_that_of_a_run_without_and_a_killed_replica_comes_back(
    via: str, model: Path, in_turn: tuple[dict[int, str], list[str]], tmp_path: Path
) -> None:
    expected, learned = in_turn
    assert len(set(expected.values())) == len(VERSIONS)

    async with Run(recipe_of(model, overlap=True), tmp_path, via) as run:
        ranks, reshard_calls = run.ranks, run.reshard_calls
        await reshard_calls.run(verify=True, version=1)
        await ranks.trainers.call("learn")
        await ranks.call("note_order", str(tmp_path / "order"))
        for version in (2, 3):
            await learn_while_sending(run, version, tmp_path / f"go {version}", pauses_late=version == 2)
            reports = await reshard_calls.collect_reports()
            assert reshard_calls.is_connected and len(reports) == 2
            # The kernels of a collective that waits for engines would occupy the GPU on which the trainer works.
            lines = (tmp_path / "order").read_text().splitlines()
            assert sorted(lines[-4:-2]) == ["engine 0 paused", "engine 1 paused"]
            assert sorted(lines[-2:]) == ["trainer 0 sends", "trainer 1 sends"]
            assert all(report.seconds["meet"] > 0 for report in reports)
            assert await run.hashes() == [expected[version]] * 2

        lost: list[tuple[WorkerGroup, Exception]] = []
        ranks.on_lost = lambda group, error: lost.append((group, error))
        dying, other = ranks.replicas
        await dying.call("die_in_reshard", signal.SIGKILL)
        await learn_while_sending(run, 4, tmp_path / "go 4", [other])
        assert [(group, type(error)) for group, error in lost] == [(dying, RankLostError)]
        # The trainers have learned on since then.
        assert reshard_calls.is_connected and await reshard_calls.collect_reports() == []
        assert await other.call("version") == [4] and await run.hashes() == [expected[4]]

        await dying.close()
        reshard_calls.add([await run.engine(0)])
        assert not reshard_calls.is_connected
        await reshard_calls.run(verify=True, version=5)
        assert await run.hashes() == [expected[5]] * 2
        # With the trainers waiting, over the same cross-world group: as before an evaluation.
        await ranks.trainers.call("learn")
        await reshard_calls.run(verify=True, version=6)
        assert await run.hashes() == [expected[6]] * 2
        await ranks.trainers.call("learn")
        assert await ranks.trainers.call("weights_hash") == learned


@pytest.mark.parametrize("via", ["shared memory", "gloo"])
async def test_an_error_of_the_sender_is_named(via: str, model: Path, tmp_path: Path) -> None:
    """At once: none of those that wait for it does so until its time is up."""

    async with Run(recipe_of(model, overlap=True), tmp_path, via) as run:
        await run.reshard_calls.run(verify=False, version=1)
        await run.ranks.trainers.call("fail_in_reshard")
        with pytest.raises(RankFailedError, match=r"rank 0 of 4 raised ValueError .*: an error of its own"):
            await asyncio.wait_for(learn_while_sending(run, 2, tmp_path / "go"), 60.0)


async def learn_while_sending(
    run: Run, version: int, go: Path, waiting: list[WorkerGroup] | None = None, *, pauses_late: bool = False
) -> None:
    """Send this version, which engines take only once the trainers have learned on; `pauses_late`: as they pause."""
    ranks, copied = run.ranks, asyncio.Event()
    for group in ranks.replicas if waiting is None else waiting:
        await group.call("wait_in_reshard", str(go))
    engines_paused = asyncio.get_running_loop().create_future()
    sending = asyncio.create_task(run.reshard_calls.run_overlapping(True, version, engines_paused, copied.set))
    await copied.wait()
    if not pauses_late:
        engines_paused.set_result(None)
    await ranks.trainers.call("learn")
    if pauses_late:
        engines_paused.set_result(None)
    assert not sending.done() or sending.exception()
    go.touch()
    await sending
