"""Functions run on real ranks, over gloo and, on GPUs, NCCL."""

from __future__ import annotations

import asyncio
import datetime
import gc
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from megarl.cluster.calls.deadlines import Deadlines
from megarl.files.private_folder import PrivateFolder
from megarl.groups import backends, rendezvous
from megarl.platform import device
from megarl.platform.imports import disable_collector
from tools.local_group import LocalGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Imports of torch, Megatron-Core and vLLM on a busy machine with cold files.
_LOAD_SECONDS = 600.0
_ENDS_OF_WORLD = (
    ("vllm.distributed.parallel_state", "destroy_model_parallel"),
    ("megatron.core.parallel_state", "destroy_model_parallel"),
    ("vllm.distributed.parallel_state", "destroy_distributed_environment"),
)


class RankPool(AbstractContextManager["RankPool"]):
    """Pool of `world_size` processes running one function after another, each in a fresh world. A context manager.

    Processes start at the first `run`, and again after a failure. Module globals set by a function stay. Closing the
    pool ends every process.
    """

    def __init__(
        self, world_size: int, *, environment: Mapping[str, str] | None = None, imports: Sequence[str] | None = None
    ) -> None:
        """Set up the pool. `imports` are imported once, before the processes fork. Default: the modules of a run's
        ranks."""
        self.world_size = world_size
        self._imports = device.forkable_imports("megarl.worker.colocated") if imports is None else imports
        self._environment = {**device.rank_environment(world_size), "OMP_NUM_THREADS": "1", **(environment or {})}
        self._runner = asyncio.Runner()
        self._group: LocalGroup | None = None
        self._logs = PrivateFolder()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 600.0, world_size: int | None = None
    ) -> list[Any]:
        """Call `function(*args)` on the first `world_size` ranks (default: all). Returns the results by rank.

        The function must be at the top level of a module, because it is sent as file and name. Arguments and results
        must be picklable. Raises the errors of `WorkerGroup.call`, including a timeout. Raises ValueError for a local
        function.
        """
        if "<" in function.__qualname__:
            raise ValueError(
                f"{function.__qualname__} is local: ranks can only run functions at the top level of a module"
            )
        file = os.path.abspath(inspect.getfile(inspect.unwrap(function)))
        address = (function.__module__, file, function.__qualname__)
        return self._runner.run(self._run(address, args, timeout_seconds, world_size or self.world_size))

    async def _run(
        self, address: Sequence[str], args: Sequence[Any], timeout_seconds: float, world_size: int
    ) -> list[Any]:
        if self._group is None:
            self._group = await LocalGroup(self.world_size, imports=self._imports).start(
                "tests.rank_pool:FunctionRunner",
                {},
                log_folder=self._logs.path,
                environment=self._environment,
            )
        try:
            self._group.deadlines = Deadlines.for_all_methods(_LOAD_SECONDS)
            await self._group.call("load", *address)
            self._group.deadlines = Deadlines.for_all_methods(timeout_seconds)
            return (await self._group.call("run", args, timeout_seconds, world_size))[:world_size]
        # Ranks are in an unknown state after a failure, also after Ctrl-C, so the next run starts new ones.
        except BaseException:
            await self._group.close()
            self._group = None
            raise

    def close(self) -> None:
        """End the processes. May be called again."""
        if self._group is not None:
            self._runner.run(self._group.close())
            self._group = None
        self._runner.close()
        self._logs.remove()

    def __exit__(self, *_: object) -> None:
        self.close()


class FunctionRunner:
    """Worker of a `RankPool`."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._num_runs = rank, 0
        self._store = rendezvous.store(world_size, _LOAD_SECONDS)

    def load(self, module_name: str, file: str, qualname: str) -> None:
        """Import the function's file under the driver's module name, so its classes pickle both ways."""
        # The worker has its own __main__, so the driver's script gets another name.
        module_name = "driver_main" if module_name == "__main__" else module_name
        if module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, file)
            assert spec is not None and spec.loader is not None
            sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
            with disable_collector():
                spec.loader.exec_module(module)
        self._function: Any = operator.attrgetter(qualname)(sys.modules[module_name])

    def run(self, args: Sequence[Any], timeout_seconds: float, world_size: int) -> Any:
        """Call the loaded function in its own world of the first `world_size` ranks."""
        import torch
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

        self._num_runs += 1
        if self._rank >= world_size:
            return None
        # Every run starts from the same random state, whatever ran before in this process.
        torch.manual_seed(0)
        # A prefix per run: keys of an earlier world in the same store would be taken for this one's.
        store = PrefixStore(f"run{self._num_runs}", self._store)
        here = device.current()
        if here.type == "cuda":
            torch.cuda.set_device(here)
        _share_gloo_device()
        dist.init_process_group(
            backends.backends_for(here),
            store=store,
            rank=self._rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        # Libraries stay in memory, so the search for groups below skips them.
        gc.freeze()
        with _no_freezing():
            result = self._function(*args)
        _meet(store, self._rank, world_size)
        # Only libraries imported by the function have groups to destroy.
        for name, verb in _ENDS_OF_WORLD:
            if name in sys.modules:
                getattr(sys.modules[name], verb)()
        if dist.is_initialized():
            dist.destroy_process_group()
        _let_go_of_groups()
        return result


@cache
def _share_gloo_device() -> None:
    """Let all gloo groups of this process share one device.

    torch makes a device for each group. Its thread wakes up 100 times a second: 0.1 % of a core. Each run of a model
    leaves some groups in memory, so a pool took ever more processor time, also between runs.
    """
    from torch.distributed import ProcessGroupGloo

    initialise = ProcessGroupGloo.__init__
    shared = ProcessGroupGloo.create_default_device()

    def initialise_with_shared_device(
        group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [shared]
        initialise(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = initialise_with_shared_device


def _meet(store: Store, rank: int, world_size: int) -> None:
    """Wait until all ranks have finished the function, before any of them destroys its process groups.

    Gloo connects pairs of ranks one by one. A rank that ends early would close connections which others are still
    making. The ranks meet in the torch store, because the function may have destroyed its groups.
    """
    store.set(f"ended on rank {rank}", "")
    store.wait([f"ended on rank {other}" for other in range(world_size)])


@contextmanager
def _no_freezing() -> Iterator[None]:
    """Turn off gc.freeze in the context. vLLM calls it at its start, and would hide its objects from the collector."""
    freeze = gc.freeze
    gc.freeze = lambda: None
    try:
        yield
    finally:
        gc.freeze = freeze


def _let_go_of_groups() -> None:
    """Free the process groups of a finished function, because each gloo group has threads that wake up periodically.

    Models of megarl and Megatron keep groups alive after the function: in cycles through autograd's hooks, invisible to
    the collector, and in a cache of Megatron's rotary embedding. So attributes holding a group are set to None.
    """
    from torch.distributed import ProcessGroup

    gc.collect()
    for holder in gc.get_objects():
        if not any(issubclass(type(held), ProcessGroup) for held in gc.get_referents(holder)):
            continue
        attributes = holder if type(holder) is dict else getattr(holder, "__dict__", {})
        for name in [name for name, value in attributes.items() if issubclass(type(value), ProcessGroup)]:
            attributes[name] = None
