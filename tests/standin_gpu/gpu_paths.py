"""Paths of megarl's code between two ranks with a GPU each. test_seeded_faults.py runs them, and copies with faults.

python gpu_paths.py PATH=FOLDER...     ranks of PATH with the modules of FOLDER, and output in FOLDER/rank_N.log
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SHAPE = (64, 32)


def reshard(rank: int) -> None:
    """Exchange two weights between the ranks twice, into memory of a vLLM engine, and compare checksums."""
    from vllm.device_allocator.cumem import CuMemAllocator

    from megarl.reshard.boxes import dense_piece
    from megarl.reshard.checks.verify import LedgerComparison
    from megarl.reshard.plan import make_plan
    from megarl.reshard.transport import Transport

    held = [(dense_piece(name, SHAPE, name, 0),) for name in ("first", "second")]
    plan = make_plan(held, held[::-1], itemsize=2, bucket_bytes=1 << 20)
    allocator = CuMemAllocator.get_instance()
    sources = {held[rank][0].storage: torch.randn(SHAPE, device="cuda").bfloat16()}
    with allocator.use_memory_pool(tag="weights"):
        destinations = {held[1 - rank][0].storage: torch.zeros(SHAPE, device="cuda", dtype=torch.bfloat16)}
    transport = Transport(plan.for_rank(rank), sources, destinations, dtype=torch.bfloat16)
    comparison = LedgerComparison(plan, rank, sources, destinations, dtype=torch.bfloat16)
    steps: list[Callable[[], object]] = [
        transport.reshard,
        transport.reshard,
        lambda: comparison.verify(comparison.engine.compute()),
        torch.cuda.synchronize,
        lambda: allocator.sleep(offload_tags=()),
    ]
    for step in steps:
        step()


def logprobs(rank: int) -> None:
    """Compute log-probs over a vocabulary split between the ranks, then once more from a CUDA graph."""
    from megarl.models.logprobs import Support, vocab_parallel_logprobs

    hidden = torch.randn(6, 16, device="cuda", dtype=torch.float64)
    weight = torch.randn(40, 16, device="cuda", dtype=torch.float64)
    targets = torch.arange(0, 72, 12, device="cuda")
    support = Support(targets.int(), torch.ones(6, dtype=torch.int32, device="cuda"))

    def compute() -> torch.Tensor:
        return vocab_parallel_logprobs(
            hidden, weight, targets, first_token_id=40 * rank, group=dist.group.WORLD, temperature=1.0,
            chunk_tokens=3, support=support,
        )[0]  # fmt: skip

    found = compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = compute()
    graph.replay()
    assert torch.equal(found, again)


def engine_all_reduce(rank: int) -> None:
    """Sum over the ranks through the communicator of a tensor-parallel vLLM engine."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    communicator = PyNcclCommunicator(group, torch.device("cuda", rank))
    values = torch.full(SHAPE, 1.0 + rank, device="cuda")
    total = communicator.all_reduce(values, torch.empty(SHAPE, device="cuda"), stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert total.unique().tolist() == [3.0]


def microbatches(rank: int) -> None:
    """Compute log-probs of two microbatches and their gradients, without a wait of the host."""
    # Of the folder: a copy of tests/host_waits.py.
    from host_waits import host_waits

    from megarl.models.logprobs import vocab_parallel_logprobs

    weight = torch.randn(40, 16, device="cuda", dtype=torch.float64, requires_grad=True)
    targets = torch.arange(0, 72, 12).pin_memory()
    total = torch.zeros((), device="cuda", dtype=torch.float64)
    with host_waits(is_refusing=True):
        for number in range(2):
            hidden = torch.full((6, 16), 0.1 * number, device="cuda", dtype=torch.float64)
            logprobs = vocab_parallel_logprobs(
                hidden, weight, targets.to("cuda", non_blocking=True), first_token_id=40 * rank,
                group=dist.group.WORLD, temperature=1.0, chunk_tokens=3,
            )[0]  # fmt: skip
            logprobs.sum().backward()
            total += logprobs.detach().sum()
    assert total.item() < 0


def checkpoint_blocks(rank: int) -> None:
    """Copy tensors to page-locked blocks and to the host, as a save does, and read them there."""
    from megarl.training.host.offload import copy_to_pinned_blocks

    shards = [torch.full((size,), 1.0 + rank, device="cuda") for size in (3000, 5, 2000)]
    copies = copy_to_pinned_blocks(shards, pin=True, block_bytes=1 << 16)
    largest = torch.stack([shard.max() for shard in shards]).to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert float(largest.sum()) == 3 * (1.0 + rank)
    assert sum(float(copy.sum()) for copy in copies) == 5005 * (1.0 + rank)


def two_groups(rank: int) -> None:
    """Sum over the ranks in two groups, one after the other."""
    groups = [dist.new_group(group_desc=name) for name in ("first", "second")]
    ones = torch.ones(2, device="cuda")
    for group in (*groups, *groups):
        dist.all_reduce(ones, group=group)
    assert ones.tolist() == [16.0, 16.0]


def gathered_parameters(rank: int) -> None:
    """Gather shards of two parameters in one call, as Megatron's distributed optimizer does."""
    group: Any = dist.new_group(backend="cpu:gloo,cuda:nccl", group_desc="shards")
    shards = [torch.full((4,), 1.0 + rank, device="cuda") for _ in range(2)]
    whole = [torch.empty(8, device="cuda") for _ in shards]
    with dist._coalescing_manager(group):  # pyright: ignore[reportPrivateImportUsage]
        for full, shard in zip(whole, shards, strict=True):
            dist.all_gather_into_tensor(full, shard, group=group)
    torch.cuda.synchronize()
    assert [full.sum().item() for full in whole] == [12.0, 12.0]


PATHS = {
    path.__name__: path
    for path in (
        reshard, logprobs, engine_all_reduce, microbatches, checkpoint_blocks, two_groups, gathered_parameters
    )
}  # fmt: skip


LIBRARIES = ("torch", "vllm.device_allocator.cumem", "vllm.distributed.device_communicators.pynccl")
"""Imported once, before the ranks are forked. They take longer than all the paths."""
RANK_SECONDS = 60


def run_rank(rank: int, path: str, folder: Path) -> None:
    """Be one of two ranks of a path, with the modules of the folder. Ends the process: 0, or 1 after an exception."""
    with (folder / f"rank_{rank}.log").open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        sys.path.insert(0, str(folder))
        from megarl.groups import rendezvous, world

        rendezvous.set_rendezvous(rendezvous.Rendezvous(key=bytes(32), file=str(folder / "meeting"), world="paths"))
        world.initialize(RANK_SECONDS)
        runpy.run_path(str(folder / "gpu_paths.py"))["PATHS"][path](rank)
        torch.cuda.synchronize()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without destructors: after an error the other rank may never answer them.
        os._exit(code)


def main() -> None:
    # FlashInfer 0.6.18 asks torch for the devices at its import, and CUDA must not be used before the forks.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"
    for name in LIBRARIES:
        importlib.import_module(name)
    for argument in sys.argv[1:]:
        path, _, folder = argument.partition("=")
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if not ranks[-1]:
                run_rank(rank, path, Path(folder))
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        (Path(folder) / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
