"""A rank of test_collectives.py: runs each collective of COLLECTIVES and writes the results to a file, as JSON.

python collectives.py gloo|nccl FOLDER     with the variables of torch.distributed's `env://`
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def values(rank: int, count: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `count` numbers that name their rank and place: 100, 101, ... on rank 1."""
    return (100 * rank + torch.arange(count, device=device)).to(dtype)


def all_reduce(rank: int, device: str) -> list[Tensor]:
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        total = values(rank, 3, device, dtype) + 1
        dist.all_reduce(total)
        found.append(total)
    for operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        total = values(rank, 3, device) - 50
        dist.all_reduce(total, op=operation)
        found.append(total)
    return found


def mean(rank: int, device: str) -> list[Tensor]:
    """Gloo has no mean: it sums, and the halves are exact."""
    total = values(rank, 3, device, torch.bfloat16)
    dist.all_reduce(total, op=dist.ReduceOp.AVG if device != "cpu" else dist.ReduceOp.SUM)
    return [total if device != "cpu" else total / 2]


def all_gather_into_tensor(rank: int, device: str) -> list[Tensor]:
    gathered = torch.zeros(6, device=device)
    dist.all_gather_into_tensor(gathered, values(rank, 3, device))
    return [gathered]


def all_gather(rank: int, device: str) -> list[Tensor]:
    gathered = [torch.zeros(3, device=device) for _ in range(2)]
    dist.all_gather(gathered, values(rank, 3, device))
    return gathered


def gather(rank: int, device: str) -> list[Tensor]:
    gathered = [torch.zeros(3, device=device) for _ in range(2)]
    dist.gather(values(rank, 3, device), gathered if rank == 1 else None, dst=1)
    return gathered


def scatter(rank: int, device: str) -> list[Tensor]:
    own = torch.zeros(2, device=device)
    dist.scatter(own, list(values(rank, 4, device).view(2, 2)) if rank == 0 else None, src=0)
    return [own]


def reduce_scatter_tensor(rank: int, device: str) -> list[Tensor]:
    part = torch.zeros(3, device=device)
    dist.reduce_scatter_tensor(part, values(rank, 6, device))
    return [part]


def reduce(rank: int, device: str) -> list[Tensor]:
    total = values(rank, 3, device)
    dist.reduce(total, dst=1)
    # Only the destination's result is defined.
    return [total] if rank == 1 else []


def broadcast(rank: int, device: str) -> list[Tensor]:
    sent = values(rank, 3, device, torch.int64)
    dist.broadcast(sent, src=1)
    return [sent]


def all_to_all_single(rank: int, device: str) -> list[Tensor]:
    received = torch.zeros(4, device=device)
    dist.all_to_all_single(received, values(rank, 4, device))
    return [received]


def all_to_all_single_with_uneven_splits(rank: int, device: str) -> list[Tensor]:
    """Rank 0 sends 1 and 3 rows, rank 1 sends 2 and none."""
    sent, received = [[1, 3], [2, 0]][rank], [[1, 2], [3, 0]][rank]
    rows = torch.zeros(sum(received), 2, device=device)
    dist.all_to_all_single(rows, values(rank, 2 * sum(sent), device).view(-1, 2), received, sent)
    return [rows]


def batch_isend_irecv(rank: int, device: str) -> list[Tensor]:
    received = [torch.zeros(3, device=device) for _ in range(2)]
    sent = [values(rank, 3, device), values(rank, 3, device) + 50]
    calls = [dist.P2POp(dist.irecv, one, 1 - rank) for one in received]
    calls += [dist.P2POp(dist.isend, one, 1 - rank) for one in sent]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received


def send_and_receive(rank: int, device: str) -> list[Tensor]:
    received = torch.zeros(3, device=device)
    if rank == 0:
        dist.send(values(0, 3, device), 1)
    else:
        dist.recv(received, 0)
    return [received]


def receive_before_another_group(rank: int, device: str) -> list[Tensor]:
    """Rank 0 waits for rank 1 last of all: a receive that stopped its caller would stop both ranks."""
    group = dist.new_group([0, 1])
    received, total = torch.zeros(3, device=device), values(rank, 3, device)
    work = dist.irecv(received, 1) if rank == 0 else None
    dist.all_reduce(total, group=group)
    if rank == 1:
        dist.send(values(1, 3, device), 0)
    if work is not None:
        work.wait()
    return [received, total]


def asynchronous(rank: int, device: str) -> list[Tensor]:
    total, gathered = values(rank, 3, device), torch.zeros(6, device=device)
    works = [
        dist.all_reduce(total, async_op=True),
        dist.all_gather_into_tensor(gathered, values(rank, 3, device), async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return [total, gathered]


def coalesced(rank: int, device: str) -> list[Tensor]:
    """Two gathers in one call of NCCL, as Megatron gathers its parameters."""
    gathered = [torch.zeros(6, device=device) for _ in range(2)]
    if device == "cpu":
        for number, one in enumerate(gathered):
            dist.all_gather_into_tensor(one, values(rank, 3, device) + number)
        return gathered
    with dist.distributed_c10d._coalescing_manager(device=torch.device(device), async_ops=True) as works:
        for number, one in enumerate(gathered):
            dist.all_gather_into_tensor(one, values(rank, 3, device) + number)
    works.wait()
    return gathered


def barrier(rank: int, device: str) -> list[Tensor]:
    dist.barrier()
    return []


COLLECTIVES: tuple[Callable[[int, str], list[Tensor]], ...] = (
    all_reduce, mean, all_gather_into_tensor, all_gather, gather, scatter, reduce_scatter_tensor, reduce, broadcast,
    all_to_all_single, all_to_all_single_with_uneven_splits, batch_isend_irecv, send_and_receive,
    receive_before_another_group, asynchronous, coalesced, barrier,
)  # fmt: skip


def main() -> None:
    backend, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    found = {}
    for collective in COLLECTIVES:
        try:
            found[collective.__name__] = [one.tolist() for one in collective(rank, device)]
        except RuntimeError as error:
            # The ranks no longer agree after an error, so the rest is left out.
            found[collective.__name__] = str(error)
            break
    (folder / f"{backend}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
