"""On which device checksums are compared and exchanged, seen with fake CUDA tensors on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.platform import device
from megarl.reshard import transport
from megarl.reshard.boxes import Layout, dense_piece
from megarl.reshard.checks import fingerprint
from megarl.reshard.checks.verify import copy_checksums
from megarl.reshard.plan import make_plan
from megarl.reshard.transport import Transport

CUDA = torch.device("cuda", 0)
SHAPE = (6, 4)


class ExchangedDevices(TorchDispatchMode):
    """Notes the devices of every tensor that is handed to an exchange between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[set[torch.device]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "alltoall" in str(func):
            self.seen.append({value.device for value in args if isinstance(value, torch.Tensor)})
        return func(*args, **(kwargs or {}))


def forget_numbers() -> None:
    """Clear the caches of fingerprints: tensors of one fake mode cannot be mixed with those of another."""
    fingerprint._random.cache_clear()
    fingerprint._row_numbers.cache_clear()


@pytest.fixture
def cuda_world(cuda_factories: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of two ranks whose tensors are fake and lie on a GPU."""
    monkeypatch.setattr(device, "current", lambda: CUDA)
    monkeypatch.setattr(transport, "is_one_machine", lambda *_: False)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    forget_numbers()
    with FakeTensorMode():
        yield
    forget_numbers()
    dist.destroy_process_group()


def held(*names: str) -> Layout:
    return tuple(dense_piece(name, SHAPE, name, 0) for name in names)


PLANS: Mapping[str, tuple[list[Layout], list[Layout]]] = {
    "all local": ([held("a"), held("a")], [held("a"), held("a")]),
    "all remote": ([held("a"), held("b")], [held("b"), held("a")]),
    "mixed": ([held("a"), held("b")], [held("a", "b"), held("b", "a")]),
    "sends only": ([held("a"), ()], [(), held("a")]),
    "no part": ([held("a"), ()], [held("a"), ()]),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PLANS)
def test_checksums_stay_on_the_gpu(cuda_world: None, name: str, rank: int) -> None:
    sources, destinations = PLANS[name]
    plan = make_plan(sources, destinations, itemsize=2, bucket_bytes=1 << 20).for_rank(rank)
    here, there = (
        {piece.storage: torch.zeros(SHAPE, dtype=torch.bfloat16, device=CUDA) for piece in side[rank]}
        for side in (sources, destinations)
    )
    with ExchangedDevices() as exchanges:
        copies, expected, found = copy_checksums(plan, here, there, dtype=torch.bfloat16)
    assert len(copies) == len(destinations[rank]) == len(expected) == len(found)
    assert expected.device == found.device == CUDA
    # Every rank takes part, also one without copies, and all through the backend for CUDA tensors.
    assert exchanges.seen == [{CUDA}]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_binds_to_tensors_on_the_gpu(cuda_world: None, name: str, rank: int) -> None:
    sources, destinations = PLANS[name]
    plan = make_plan(sources, destinations, itemsize=2, bucket_bytes=1 << 20).for_rank(rank)
    here, there = (
        {piece.storage: torch.zeros(SHAPE, dtype=torch.bfloat16, device=CUDA) for piece in side[rank]}
        for side in (sources, destinations)
    )
    bound = Transport(plan, here, there, dtype=torch.bfloat16)
    assert {view.device for step in bound._steps for view in views(step)} <= {CUDA}


def views(step: Any) -> Iterator[torch.Tensor]:
    for copies in (step.local, step.pack, step.unpack):
        for pairs in (copies.tensors, copies.small, copies.on_cpu):
            yield from (tensor for pair in pairs for tensor in pair)
