"""`RankPool` on real gloo ranks."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.cluster.calls.rank_errors import RankFailedError
from tests.rank_pool import RankPool

pytestmark = pytest.mark.distributed


@dataclass
class Share:
    rank: int
    value: float


def weighted_sum(share: Share) -> Share:
    total = torch.tensor([share.value * 10 ** dist.get_rank()])
    dist.all_reduce(total)
    return Share(dist.get_rank(), total.item())


def gather_pids() -> list[int]:
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def exchange_tensor() -> torch.Tensor:
    """Rank 0 sends primes to rank 1, which returns them doubled."""
    primes = torch.tensor([2, 3, 5, 7])
    if dist.get_rank() == 0:
        dist.send(primes, dst=1)
        return primes
    received = torch.empty_like(primes)
    dist.recv(received, src=0)
    return received * 2


def fail_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ArithmeticError("the last rank cannot count")
    dist.barrier()


def sleep_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(600)


def end_apart(record: str) -> None:
    """Rank 0 ends at once and notes when its world ends; rank 1 ends later and notes that."""
    destroy = dist.destroy_process_group

    def note(event: str) -> None:
        with open(record, "a") as lines:
            print(event, file=lines)

    def noted() -> None:
        dist.destroy_process_group = destroy
        note("rank 0's world has ended")
        destroy()

    if dist.get_rank() == 0:
        dist.destroy_process_group = noted
        return
    for _ in range(30):  # so long rank 0 may take to end the world
        if os.path.exists(record):
            break
        time.sleep(0.01)
    note("rank 1 is through")


def num_threads_and_word() -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["WORD"]


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, environment={"WORD": "Rhone"}) as pool:
        yield pool


def test_a_pool_keeps_its_processes_and_renews_the_world(pool):
    pids = pool.run(gather_pids)
    assert pids[0] == pids[1] and len({os.getpid(), *pids[0]}) == 3
    assert pool.run(weighted_sum, Share(-1, 3.0)) == [Share(0, 33.0), Share(1, 33.0)]
    assert [answer.tolist() for answer in pool.run(exchange_tensor)] == [[2, 3, 5, 7], [4, 6, 10, 14]]
    assert pool.run(gather_pids) == pids
    assert pool.run(gather_pids, world_size=1) == [pids[0][:1]]
    assert pool.run(num_threads_and_word) == [(1, "Rhone")] * 2


def test_a_pool_names_the_failing_rank_and_starts_anew(pool):
    with pytest.raises(RankFailedError, match="rank 1 of 2 raised ArithmeticError") as caught:
        pool.run(fail_on_last)
    assert "in fail_on_last" in caught.value.__notes__[0]
    pool.run(weighted_sum, Share(-1, 1.0))
    started = time.monotonic()
    pool.run(weighted_sum, Share(-1, 1.0))
    patience = max(1.0, 4 * (time.monotonic() - started))
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 did not answer `run` within") as caught:
        pool.run(sleep_on_last, timeout_seconds=patience)
    assert "in sleep_on_last" in caught.value.__notes__[0]
    assert pool.run(weighted_sum, Share(-1, 1.0)) == [Share(0, 11.0), Share(1, 11.0)]


def test_no_world_ends_before_all_ranks_are_through(pool, tmp_path):
    record = tmp_path / "record"
    pool.run(end_apart, str(record))
    assert record.read_text().splitlines() == ["rank 1 is through", "rank 0's world has ended"]


def test_local_functions_are_refused(pool):
    with pytest.raises(ValueError, match="local"):
        pool.run(lambda: None)


_groups: list[dist.ProcessGroup | None] = []


def keep_groups() -> int:
    """Make groups that stay in memory. Returns the number of this process's threads that poll sockets for gloo."""
    _groups.extend(dist.new_group() for _ in range(3))
    tasks = Path("/proc/self/task")
    return sum((task / "comm").read_text().startswith("gloo_tcp_loop") for task in tasks.iterdir())


def test_all_groups_of_a_rank_share_the_thread_that_polls_sockets(ranks: RankPool) -> None:
    assert [ranks.run(keep_groups, world_size=2) for _ in range(2)] == [[1, 1], [1, 1]]
