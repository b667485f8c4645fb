"""torch's NCCL process group between two processes, each with a device of its own: gloo's numbers, and named faults."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standin_gpu.collectives import COLLECTIVES

pytestmark = pytest.mark.standin_gpu
PROGRAM = Path(__file__).with_name("collectives.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {}


@pytest.fixture
def found(
    results: dict[str, Any], run_ranks: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Results of each collective, by backend and rank, then by name."""
    if not results:
        folder = tmp_path_factory.mktemp("collectives")
        for backend in ("gloo", "nccl"):
            outputs = run_ranks(str(PROGRAM), backend, str(folder))
            for rank, output in enumerate(outputs):
                file = folder / f"{backend}-{rank}.json"
                assert file.exists(), output
                results[f"{backend}-{rank}"] = json.loads(file.read_text())
    return results


@pytest.mark.parametrize("name", [collective.__name__ for collective in COLLECTIVES])
def test_numbers_are_those_of_gloo(found: dict[str, Any], name: str) -> None:
    for rank in range(2):
        assert found[f"nccl-{rank}"][name] == found[f"gloo-{rank}"][name]
        assert not isinstance(found[f"gloo-{rank}"][name], str)


FAULTS = {
    "lengths": (
        "dist.all_reduce(torch.ones(2 + rank, device='cuda'), group=group)",
        "ncclAllReduce of 2 float32, reduction 0 at <string>:1, rank 1 calls ncclAllReduce of 3 float32",
    ),
    "types": (
        "dist.all_reduce(torch.ones(2, device='cuda', dtype=[torch.int32, torch.float32][rank]), group=group)",
        "ncclAllReduce of 2 int32, reduction 0 at <string>:1, rank 1 calls ncclAllReduce of 2 float32",
    ),
    "reductions": (
        "dist.all_reduce(torch.ones(2, device='cuda'), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group=group)",
        "ncclAllReduce of 2 float32, reduction 0 at <string>:1, rank 1 calls ncclAllReduce of 2 float32, reduction 2",
    ),
    "calls": (
        "dist.broadcast(ones, 0, group=group) if rank else dist.all_reduce(ones, group=group)",
        "ncclAllReduce of 2 float32, reduction 0 at <string>:1, rank 1 calls ncclBroadcast of 2 float32, root 0",
    ),
    "a receive longer than its send": (
        "dist.send(ones, 1, group=group) if rank == 0 else dist.recv(torch.ones(3, device='cuda'), 0, group=group)",
        "ncclRecv of 3 float32 at <string>:1, rank 0 calls ncclSend of 2 float32 at <string>:1",
    ),
    "a message and a collective": (
        "dist.all_to_all_single(ones.clone(), ones, [1, 1], [1, 1], group=group) if rank"
        " else dist.all_reduce(ones, group=group)",
        "ncclAllReduce of 2 float32, reduction 0 at <string>:1, rank 1 calls ncclRecv of 1 float32 at <string>:1",
    ),
    "no call": (
        "rank or dist.all_reduce(ones, group=group)",
        "rank 0 waits for rank 1 in ncclAllReduce of 2 float32, reduction 0 at <string>:1, for more than 3 s",
    ),
}
"""The calls of two ranks, and the error of one of them."""

FAULTY_RANK = """
import json, os, sys, torch, torch.distributed as dist
from datetime import timedelta
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
ones = torch.ones(2, device="cuda")
caught = {}
for name, call in json.loads(sys.argv[1]).items():
    # A group of its own, whose communicator exists before the fault.
    group = dist.new_group([0, 1])
    dist.all_reduce(ones.clone(), group=group)
    torch.cuda.synchronize()
    dist.barrier(group=dist.new_group([0, 1], backend="gloo"))
    caught[name] = ""
    try:
        eval(call)
        torch.cuda.synchronize()
    except RuntimeError as error:
        caught[name] = str(error)
print(json.dumps(caught), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str]]:
    return []


@pytest.mark.parametrize("name", FAULTS)
def test_calls_that_differ_are_named(
    errors: list[dict[str, str]], run_ranks: Callable[..., list[str]], name: str
) -> None:
    if not errors:
        calls = json.dumps({name: call for name, (call, _) in FAULTS.items()})
        outputs = run_ranks("-c", FAULTY_RANK, calls, STANDIN_GPU_WAIT_SECONDS="3")
        errors += [json.loads(output.splitlines()[-1]) for output in outputs]
    message = FAULTS[name][1]
    assert message in errors[0][name] or message in errors[1][name], errors


WAITING_RANK = """
import os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl")
# As in a group of a trainer and two engines with worlds of their own.
os.environ["RANK"] = "0"
for seconds in (0, 6):
    lengths = (1, 2) if rank == 0 else (rank,)
    tensors = [torch.full((length,), float(rank == 0), device="cuda") for length in lengths]
    if rank == 0:
        time.sleep(seconds)
        calls = [dist.P2POp(dist.isend, tensor, length) for length, tensor in zip(lengths, tensors)]
    else:
        calls = [dist.P2POp(dist.irecv, tensors[0], 0)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    torch.cuda.synchronize()
    print(*tensors[-1].tolist(), flush=True)
os._exit(0)
"""


def test_two_processes_of_rank_0_may_wait_for_a_third(run_ranks: Callable[..., list[str]]) -> None:
    outputs = run_ranks("-c", WAITING_RANK, size=3)
    assert [output.split()[-2:] for output in outputs] == [["1.0", "1.0"]] * 3, outputs


SLOW_WORLDS = """
import os, sys, time, torch, torch.distributed as dist
number, world = int(os.environ["RANK"]) % 2, int(os.environ["RANK"]) // 2
os.environ["RANK"] = str(number)
torch.cuda.set_device(number)
dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{sys.argv[1]}/{world}", rank=number, world_size=2)
group = dist.new_group(group_desc=f"world {world}")
ones = torch.ones(2, device="cuda")
# Rank 0 of one world and rank 1 of the other wait for long: by ranks alone, for each other.
for seconds in (0, 6):
    time.sleep(seconds if number != world else 0)
    dist.all_reduce(ones, group=group)
    torch.cuda.synchronize()
print(*ones.tolist(), flush=True)
os._exit(0)
"""


def test_ranks_of_two_worlds_do_not_wait_for_each_other(run_ranks: Callable[..., list[str]], tmp_path: Path) -> None:
    outputs = run_ranks("-c", SLOW_WORLDS, str(tmp_path), size=4)
    assert [output.split()[-2:] for output in outputs] == [["4.0", "4.0"]] * 4, outputs


def test_memory_of_the_host_and_of_another_device_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    nccl, invalid = ctypes.CDLL("libnccl.so.2"), 4
    communicator, identity = ctypes.c_void_p(), (ctypes.c_char * 128)()
    assert nccl.ncclGetUniqueId(identity) == 0

    class Identity(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_char * 128),)

    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Identity, ctypes.c_int]
    torch.cuda.set_device(0)
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), 1, Identity.from_buffer(identity), 0) == 0
    for tensor, message in (
        (torch.ones(2), "ncclAllReduce with memory of the host"),
        (torch.ones(2, device="cuda:1"), "ncclAllReduce of a communicator on device 0 with memory of device 1"),
    ):
        address = ctypes.c_void_p(tensor.data_ptr())
        assert nccl.ncclAllReduce(address, address, ctypes.c_size_t(2), 7, 0, communicator, None) == invalid
        assert message in capfd.readouterr().err
