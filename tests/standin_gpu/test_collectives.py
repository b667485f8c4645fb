"""torch's NCCL process group between two processes of the stand-in, each with a device of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.standin_gpu,
    pytest.mark.skipif("STANDIN_GPU_STATE" not in os.environ, reason="no stand-in for a GPU: launch/test.sh --cuda"),
]

START = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl")
def values(*numbers, **options):
    return torch.tensor(numbers, device="cuda", **options)
"""

COLLECTIVES = """
total = values(rank + 1.0, 10.0 * rank)
dist.all_reduce(total)
assert total.tolist() == [3, 10], total
mean = values(rank + 1.0, dtype=torch.bfloat16)
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
assert mean.tolist() == [1.5], mean
largest = values(5 - rank, dtype=torch.int64)
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
assert largest.tolist() == [5]
gathered = torch.empty(4, device="cuda")
dist.all_gather_into_tensor(gathered, values(2.0 * rank, 2.0 * rank + 1))
assert gathered.tolist() == [0, 1, 2, 3]
part = torch.empty(2, device="cuda")
dist.reduce_scatter_tensor(part, torch.arange(4.0, device="cuda"))
assert part.tolist() == [[0, 2], [4, 6]][rank]
dist.barrier()
dist.destroy_process_group()
print("done")
"""

DIFFERENT_LENGTHS = """
try:
    dist.all_reduce(torch.ones(2 + rank, device="cuda"))
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


def run_ranks(tmp_path: Path, program: str) -> list[str]:
    """Run a program as two ranks and return the output of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "TMPDIR": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", START + program],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_collectives_move_the_data(tmp_path: Path) -> None:
    outputs = run_ranks(tmp_path, COLLECTIVES)
    assert [output.splitlines()[-1:] for output in outputs] == [["done"], ["done"]], "\n".join(outputs)


def test_different_lengths_are_an_error(tmp_path: Path) -> None:
    outputs = run_ranks(tmp_path, DIFFERENT_LENGTHS)
    assert "rank 0 expects 8 bytes, rank 1 sent 12" in outputs[0]
    assert "rank 1 expects 12 bytes, rank 0 sent 8" in outputs[1]
