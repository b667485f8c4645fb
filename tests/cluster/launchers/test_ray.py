"""A real Ray cluster of three nodes on this machine: one recipe there as alone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

from megarl.cluster.agents.topology import NodeKind
from megarl.config import RewardConfig
from megarl.environments.environment_pool import EnvironmentPool, RaisedError, process_settings
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rewards.scoring.reward_process import worker_settings
from megarl.types import ConfigError, PeerLostError, Problem
from tests.child_processes import is_alive, processes_writing_to
from tests.cluster.containers_on_nodes import run_on_all
from tests.cluster.lateness import see_who_is_late
from tests.cluster.losing import play, scenes
from tests.cluster.spawned import START_SECONDS, group_on
from tests.held_run import REWARD, HeldRun, assert_trained_alike, steps_of
from tools.make_dataset import make_dataset
from tools.runs import run_megarl

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

    from megarl.cluster.launchers.ray import RayNodes

ray = pytest.importorskip("ray", reason="needs Ray: launch/setup.sh ray")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]

RECIPE = """
name: placed
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{launcher: ray, ray_address: "{address}", nodes: 2, ranks_per_node: 1}}
trainer: {{max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 2e-3}}
rollout: {{kv_cache_gib: 0.02, sampling: {{max_new_tokens: 12}}}}
reward: {{functions: ["letters:share_of_digits"]}}
train: {{steps: 2, prompts_per_step: 4, samples_per_prompt: 4}}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two nodes with room for two ranks each, under switches whose order is not theirs."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for switch in ("b", "a"):
            own = {"small": 1.0} if switch == "a" else {}
            cluster.add_node(num_cpus=2, labels={"switches": f"root.{switch}"}, resources=own)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(Path(tempfile.gettempdir(), "ray"), ignore_errors=True)  # Ray leaves its logs


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    cluster: Cluster,
    tiny_model: Callable[..., Path],
) -> Path:
    """A folder with a recipe for the cluster."""
    folder = tmp_path_factory.mktemp("ray")
    make_dataset(folder / "data", sft=8, train=64, heldout=8)
    (folder / "letters.py").write_text(REWARD)
    recipe = RECIPE.format(model=tiny_model(num_layers=2), address=cluster.address)
    (folder / "recipe.yaml").write_text(recipe)
    return folder


@asynccontextmanager
async def nodes_on_ray(
    cluster: Cluster, kind: NodeKind, logs: Path, avoided_nodes: Sequence[str] = ()
) -> AsyncIterator[RayNodes]:
    """Nodes of the cluster with agents, which end with the context."""
    from megarl.cluster.launchers.ray import RayNodes

    nodes = RayNodes(kind, {}, (), cluster.address, avoided_nodes=avoided_nodes)
    try:
        await nodes.start(logs, START_SECONDS)
        yield nodes
    finally:
        await nodes.close()
        ray.shutdown()


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_megarl("train", "recipe.yaml", *overrides, folder=folder)


@pytest.mark.long
def test_a_run_on_two_nodes_learns_what_one_does_alone(folder: Path) -> None:
    """Two data-parallel ranks, whose gradients are summed in the same order."""
    alone = ("name=alone_2", "cluster.launcher=local", "cluster.nodes=1", "cluster.ranks_per_node=2")
    for overrides in (("name=nodes",), alone):
        done = train(folder, *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [folder / "runs" / name for name in ("nodes", "alone_2")]
    assert_trained_alike(*map(steps_of, runs))
    weights = [(run / "hf/model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    machine = json.loads((runs[0] / "logs/latest/attempt.json").read_text())["machine"]
    assert machine["ranks"].count("1 on ") == 2, machine


@pytest.mark.long
def test_a_run_that_loses_a_rank_goes_on_without_it_and_grows_back(folder: Path) -> None:
    """It trains as the run alone does."""
    steps = "train.steps=6"
    done = train(folder, "name=alone", "cluster.launcher=local", "cluster.nodes=1", "cluster.ranks_per_node=2", steps)
    assert done.returncode == 0, done.stdout + done.stderr
    options = ("cluster.recover=shrink", "checkpoint.replicate=1", steps)
    run = HeldRun(folder, "placed", "recipe.yaml", *options)
    with run.held(after=1):
        killed_after = len(run.steps())
        [process] = processes_writing_to(run.path, "rank_0001.log", command="ray::")
        os.kill(process, signal.SIGKILL)
    with run.held(after=killed_after + 1):
        run.wait_for(lambda: "the run returns to this size" in run.screen())
    run.finish()
    printed, found = run.screen(), run.steps()
    assert "the run continues on 1 of them" in printed and "resize from " in printed, printed
    assert [step["step"] for step in found] == list(range(1, 7))
    assert_trained_alike(steps_of(folder / "runs/alone"), found)
    machine = json.loads((run.path / "logs/latest/attempt.json").read_text())["machine"]
    assert machine["ranks"].count("1 on ") == 2, machine


@pytest.mark.long
def test_engines_on_actors_of_their_own_learn_what_they_do_alone(folder: Path) -> None:
    """On a node that has what the recipe says of the engines' kind."""
    alone = ("name=separate_alone", "cluster.launcher=local", "cluster.ranks_per_node=4", "rollout.ranks=2")
    separate = ("trainer.tp=1", "rollout.tp=1", "rollout.placement=separate", "train.steps=2", "cluster.nodes=1")
    kinds = "cluster.groups.engines={nodes: 1, ranks_per_node: 2, ray_resources: {small: 0.001}}"
    for overrides in (("name=separate", "cluster.ranks_per_node=2", kinds), alone):
        done = train(folder, *separate, "algorithm.old_logprobs=trainer", *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [folder / "runs" / name for name in ("separate", "separate_alone")]
    weights = [(run / "hf/model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    assert len(list((runs[0] / "logs/latest").glob("rank_*"))) == 4


def nodes_without_cluster(monkeypatch: pytest.MonkeyPatch, living: Callable[[], list[dict[str, Any]]]) -> RayNodes:
    """Return nodes that need one CPU, of a cluster whose living nodes are the result of `living`."""
    from megarl.cluster.launchers.ray import RayNodes

    nodes = RayNodes(NodeKind(0, 1, 1), {}, (), "nowhere:1")
    monkeypatch.setattr(nodes, "_list_usable_nodes", living)
    return nodes


async def test_the_driver_goes_on_while_it_waits_for_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    living: list[dict[str, Any]] = []
    nodes = nodes_without_cluster(monkeypatch, lambda: living)
    nodes._timeout_seconds = 5.0
    asyncio.get_running_loop().call_soon(living.append, {"Resources": {"CPU": 1.0}})
    await nodes._await_nodes()
    assert living


async def test_no_actor_starts_before_the_cluster_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = nodes_without_cluster(monkeypatch, list)
    nodes._timeout_seconds = -1.0
    start = AsyncMock()
    monkeypatch.setattr(nodes, "_start_actors", start)
    with pytest.raises(ConfigError, match="needs 1 nodes with 1 CPUs each, the Ray cluster has nodes with "):
        await nodes.launch(("nowhere", 1), b"")
    start.assert_not_called()


@pytest.mark.parametrize(
    ("error", "text"), [(None, "an actor of Ray ended"), (OSError("a\nb"), "an actor of Ray ended: b")]
)
async def test_the_end_of_an_actor_is_told_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None, text: str
) -> None:
    nodes = nodes_without_cluster(monkeypatch, list)
    loop = asyncio.get_running_loop()
    served = loop.create_future()
    nodes._serve_futures.append(served)
    loop.call_soon(*((served.set_result, None) if error is None else (served.set_exception, error)))
    assert await nodes.await_end() == text


@pytest.mark.parametrize("is_ended", [True, False])
async def test_an_actor_that_ends_before_it_is_watched_is_told(monkeypatch: pytest.MonkeyPatch, is_ended: bool) -> None:
    """Actors of lost nodes, which ended before the start of the new ones, do not count."""
    nodes = nodes_without_cluster(monkeypatch, list)
    lost, started = (asyncio.get_running_loop().create_future() for _ in range(2))
    lost.set_exception(OSError("an earlier loss"))
    nodes._serve_futures.append(lost)
    if is_ended:
        started.set_exception(OSError("no module named megarl"))
    monkeypatch.setattr(nodes, "_reserve_nodes", AsyncMock())
    monkeypatch.setattr(nodes, "_start_actor", lambda *_: nodes._serve_futures.append(started))
    assert await nodes._start_actors(1, ("nowhere", 1), b"", 1.0)
    ending = asyncio.create_task(nodes.await_end())
    if not is_ended:
        for _ in range(5):
            await asyncio.sleep(0)
        assert not ending.done()
        started.set_exception(OSError("no module named megarl"))
    assert await ending == "an actor of Ray ended: no module named megarl"
    assert lost.exception() is not None


def test_too_small_a_cluster_says_what_it_has(folder: Path) -> None:
    done = train(
        folder,
        "name=large",
        "cluster.nodes=4",
        "cluster.ranks_per_node=2",
        "trainer.tp=4",
        "cluster.start_timeout_seconds=3",
    )
    assert done.returncode == 2, done.stdout + done.stderr
    lack = "needs 4 nodes with 2 CPUs each, the Ray cluster has nodes with [2, 2, 0]"
    assert (
        f"the run {lack}; waiting at most 3 s for more nodes" in done.stderr
        and f"cluster.nodes = 4: {lack}; add nodes" in done.stderr
    )
    assert json.loads((folder / "runs/large/status.json").read_text())["exit_code"] == 2


@pytest.mark.long
async def test_who_is_late_on_ray_is_told_with_the_stacks_of_all_ranks(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    async with nodes_on_ray(cluster, NodeKind(0, 2, 2), tmp_path) as nodes, group_on(nodes, tmp_path, 4) as group:
        await see_who_is_late(group, 2.0)


@pytest.mark.parametrize("scene", scenes())
async def test_a_rank_on_ray_that_is_lost_is_named_and_the_others_go_on(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: str
) -> None:
    from megarl.cluster.launchers.ray import RayNodes

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    try:
        await play(scene, RayNodes(NodeKind(0, 2, 2), {}, (), cluster.address), tmp_path)
    finally:
        ray.shutdown()


async def test_containers_of_attempts_start_on_all_nodes_of_ray(cluster: Cluster, tmp_path: Path) -> None:
    async with nodes_on_ray(cluster, NodeKind(0, 2, 1), tmp_path) as nodes:
        report = await run_on_all(lambda: nodes.agents, 4)
    assert sorted(report["nodes"].values()) == [2, 2] and report["num_living"] == 4
    assert report["answers"] == {"got hello": 4} and report["left"] == 0


@pytest.mark.long
async def test_no_rank_on_ray_is_placed_on_a_faulty_node(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes have room. The ranks are on the one that is not named, whichever is named."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))

    async def node_without(*names: str) -> str:
        async with (
            nodes_on_ray(cluster, NodeKind(0, 1, 2), tmp_path, names) as nodes,
            group_on(nodes, tmp_path, 2) as group,
        ):
            [node] = {place[0] for place in group.topology}
            return node

    first = await node_without()
    second = await node_without(first)
    assert second != first == await node_without(second)


@pytest.mark.long
async def test_a_node_that_dies_is_replaced_by_another(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a free node the size that the run had is not reached again."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    ray_nodes = [cluster.add_node(num_cpus=1, resources={"own": 1.0}) for _ in range(2)]
    kind = NodeKind(0, 2, 1, ray_resources={"own": 0.001})
    try:
        async with nodes_on_ray(cluster, kind, tmp_path) as nodes:
            async with group_on(nodes, tmp_path, 2) as group:
                lost = (await group.call("pid"))[1]
                left = nodes.agents[0]
                dead = next(node for node in ray_nodes if group.topology[1][0].endswith(f"({node.node_id[:8]})"))
                waiting = asyncio.create_task(group.call("sleep", 600))
                await asyncio.sleep(0)  # it is sent
                cluster.remove_node(dead, allow_graceful=False)
                ray_nodes.remove(dead)
                with pytest.raises(PeerLostError, match=r"^rank 1 of 2"):
                    await waiting
                assert not is_alive(lost)
            assert nodes.num_living == 1
            with pytest.raises(ConfigError, match=r"^cluster.nodes: "):
                await nodes.replenish(2, START_SECONDS)
            # The agent of the living node is still the same one.
            for num_nodes in (2, 3):
                ray_nodes.append(cluster.add_node(num_cpus=1, resources={"own": 1.0}))
                await nodes.replenish(num_nodes, START_SECONDS)
                assert nodes.agents[0] is left and nodes.num_living == num_nodes
                async with group_on(nodes, tmp_path, num_nodes) as group:
                    assert group.topology[-1][0].endswith(f"({ray_nodes[-1].node_id[:8]})")
                    assert await group.call("product", 1) == [(rank, rank + 1) for rank in range(num_nodes)]
    finally:
        for node in ray_nodes:
            cluster.remove_node(node)


PLACES = """
import os
import time
from pathlib import Path

from megarl.types import Reward


def node(completion_text, answer, correct_score):
    # Above the process are its supervisor, the actor, and the node's raylet.
    pid = os.getppid()
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    Path(f"node_{pid}").touch()
    if completion_text == "slow":
        time.sleep(60)
    return Reward(float(answer), True, True)
"""


def await_places() -> None:
    """Wait until this driver's node knows all nodes: an actor goes elsewhere from one that is not known yet."""
    from ray.exceptions import TaskUnschedulableError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.remote(num_cpus=0)(lambda: True)
    waiting = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    deadline = time.monotonic() + 120
    while waiting:
        try:
            ray.get(here.options(scheduling_strategy=NodeAffinitySchedulingStrategy(waiting[0], soft=False)).remote())
            waiting.pop(0)
        except TaskUnschedulableError:
            assert time.monotonic() < deadline, ray.nodes()
            time.sleep(0.1)


ENVIRONMENT = """
import os
import time
from pathlib import Path

from megarl.environments import Start


class Where:
    def reset(self, problem, seed):
        if problem.answer == "raise":
            raise ValueError("no")
        while problem.answer == "hang":
            time.sleep(1)
        pid = os.getppid()  # above it are its supervisor, the actor, and the node's raylet
        for _ in range(2):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return Start(({"role": "user", "content": str(pid)},))

    def step(self, turn):
        raise NotImplementedError

    def close(self):
        pass
"""


async def test_environments_run_on_every_node_and_one_that_hangs_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    from megarl.cluster.launchers.ray import join
    from megarl.processes.on_ray import round_robin_over_nodes

    (tmp_path / "where.py").write_text(ENVIRONMENT)
    join(cluster.address)
    await_places()
    settings = process_settings(f"{tmp_path / 'where.py'}:Where", {}, 0.5)
    pool = EnvironmentPool(settings, num_processes=3, make_server=round_robin_over_nodes())

    async def place(answer: str, seconds: float | None, met: asyncio.Barrier | None) -> str:
        async with pool.reserve_process() as seat:
            if met is not None:
                await met.wait()
            problem = Problem(0, ({"role": "user", "content": "Where?"},), (1,), answer)
            start = await asyncio.wait_for(seat.environment().reset(problem, 0), seconds)
            return start.messages[0]["content"]

    async def run() -> None:
        met = asyncio.Barrier(3)
        places = await asyncio.gather(*(place("", None, met) for _ in range(3)))
        assert len(set(places)) == 3
        with pytest.raises(RaisedError, match="ValueError: no"):
            await place("raise", None, None)
        with pytest.raises(TimeoutError):
            await place("hang", 1.0, None)
        assert len(await asyncio.gather(*(place("", None, None) for _ in range(6)))) == 6

    try:
        await run()
    finally:
        pool.close()
        ray.shutdown()


def test_a_process_that_cannot_start_or_is_closed_is_not_placed_again(cluster: Cluster, tmp_path: Path) -> None:
    from megarl.cluster.launchers.ray import join
    from megarl.processes.on_ray import round_robin_over_nodes

    (tmp_path / "where.py").write_text(ENVIRONMENT)
    settings = process_settings(f"{tmp_path / 'where.py'}:Where", {}, 0.5)
    join(cluster.address)
    make_server = round_robin_over_nodes()
    try:
        with pytest.raises(PeerLostError, match=r"on Ray cannot be started: (?s:.*)No such file"):
            make_server(replace(settings, folder=str(tmp_path / "absent")), None).wait_until_ready()
        process: Any = make_server(settings, None)
        ray.kill(process._actor)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(process.wait_until_ready)
            time.sleep(0.5)
            process.close()
            with pytest.raises(PeerLostError, match="closed"):
                waiting.result()
    finally:
        ray.shutdown()


@pytest.mark.long
async def test_rewards_are_scored_on_any_node_and_outlive_one(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megarl.cluster.launchers.ray import join
    from megarl.processes.on_ray import round_robin_over_nodes

    (tmp_path / "places.py").write_text(PLACES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    join(cluster.address)
    spare = cluster.add_node(num_cpus=0)
    cluster.wait_for_nodes()
    await_places()
    settings = worker_settings(RewardConfig.model_validate({"functions": ["places:node"], "wall_timeout_seconds": 5.0}))
    pool = RewardPool(settings, num_workers=4, make_server=round_robin_over_nodes())
    try:

        async def score(*completions: str) -> list[float | str]:
            found = await asyncio.gather(*(pool.score(Sample(text, str(i))) for i, text in enumerate(completions)))
            return [scored.failure or scored.reward.score for scored in found]

        assert await score("a", "slow", *"cdefgh") == [0.0, "timeout", 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert len(list(tmp_path.glob("node_*"))) == 4
        cluster.remove_node(spare, allow_graceful=False)
        assert await score(*"abcdefgh") == [float(i) for i in range(8)]
    finally:
        pool.close()
        ray.shutdown()
