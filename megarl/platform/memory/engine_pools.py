"""vLLM's memory pools of a sleeping engine. A process frees them before it builds another engine.

vLLM 0.30 has one object with the pools per process, and builds no engine while they hold memory. On a CPU there are no
pools, and these functions do nothing.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor


def allow_free_while_asleep() -> None:
    """Allow memory of the pools to be freed while the engine sleeps. Call it before an engine is built.

    vLLM 0.30 would unmap this memory a second time. This fails, and all later allocations from the pools too.
    """
    if (allocator := _find_allocator()) is not None:
        # vLLM passes this attribute to each pool it creates.
        allocator.python_free_callback = partial(_free_allocation, allocator)


def move_constants() -> None:
    """Move the tensors of Python modules out of the pools.

    Call it after an engine's model was built. A module imported during the build creates its constants in the pool:
    they would lose their values in the first sleep.
    """
    if (allocator := _find_allocator()) is not None:
        modules = list(sys.modules.values())
        _move_out_of_pools(
            allocator, (value for module in modules for value in list(getattr(module, "__dict__", {}).values()))
        )


def _find_allocator() -> Any:
    """Return vLLM's object with the pools, or None."""
    if "vllm" not in sys.modules:
        return None
    from vllm.device_allocator import cumem

    return cumem.CuMemAllocator.get_instance() if cumem.cumem_available else None


def _free_allocation(allocator: Any, address: int) -> Any:
    """Free one allocation of a sleeping pool. Map it first, because vLLM unmaps what it frees."""
    from vllm.device_allocator.cumem import create_and_map

    allocation = allocator.pointer_to_data[address]
    if allocation.is_asleep:
        create_and_map(allocation.handle)
        allocation.is_asleep = False
    return allocator._python_free_callback(address)


def _move_out_of_pools(allocator: Any, objects: Iterable[object]) -> None:
    """Move tensors among `objects` from the pools to ordinary memory. Views still share their storage.

    Sleeping memory has lost its values: zeros take their place.
    """
    allocations = sorted(allocator.pointer_to_data.items())
    addresses = [address for address, _ in allocations]
    new_storages: dict[int, torch.UntypedStorage] = {}
    for value in objects:
        # Not isinstance: it calls properties of foreign objects, which may import modules.
        if not issubclass(type(value), torch.Tensor):
            continue
        tensor = cast(torch.Tensor, value)
        if not (address := _address(tensor)):
            continue
        allocation_index = bisect.bisect_right(addresses, address) - 1
        if allocation_index < 0 or address >= addresses[allocation_index] + allocations[allocation_index][1].handle[1]:
            continue
        storage = tensor.untyped_storage()
        if address not in new_storages:
            is_asleep = allocations[allocation_index][1].is_asleep
            new_storages[address] = _zeros(storage) if is_asleep else storage.clone()
        with torch.no_grad():
            tensor.set_(new_storages[address], tensor.storage_offset(), tensor.size(), tensor.stride())


def _address(tensor: torch.Tensor) -> int:
    if not tensor.is_cuda or tensor.layout != torch.strided or isinstance(tensor, FakeTensor):
        return 0
    return tensor.untyped_storage().data_ptr()


def _zeros(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.zeros(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()
