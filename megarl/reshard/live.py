"""The live reshard: from the trainer's parameters into the engine's, planned once and carried out every step.

`Reshard` writes an engine's live parameters in place; of modules that quantise, it hands each to vLLM's own quantiser
once all its weights are there. Where an engine keeps its weights in yet another form than the checkpoint's,
`GatheredReshard` hands full tensors to vLLM's own loader instead.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.families import hf_tensors
from megarl.families.shape import ModelShape
from megarl.platform.bridge import rank_in
from megarl.platform.left_collective import in_own_world
from megarl.reshard.boxes import Layout, dense_piece
from megarl.reshard.layouts.vllm import DirectWriteError, record_layout, zero_padding
from megarl.reshard.layouts.vllm_quantised import QuantisedModule, is_spoilt, quantised_modules, spoil
from megarl.reshard.plan import Plan, RankTopology, Transfer, make_plan
from megarl.reshard.quantised import WaitingRoom
from megarl.reshard.staging import gathered
from megarl.reshard.transport import Transport, device_of, strided_view
from megarl.reshard.verify import checksum, verify
from megarl.types import MegarlError

LoadTensors = Callable[[Iterable[tuple[str, Tensor]]], None]
"""vLLM's loader of full checkpoint tensors."""


def record(
    model: nn.Module | None, shape: ModelShape, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> tuple[Layout | None, str]:
    """The recorded layout of this rank's engine; or None, and why some rank's engine cannot be written in place.

    Without a `model` the rank has no engine: its layout is empty. A collective over the group, or the world: all ranks
    write in place, or none does.
    """
    recorded: Layout | None = ()
    refusal = ""
    try:
        if model is not None:
            recorded = record_layout(model, {name: (size, dtype) for name, size in hf_tensors(shape).items()})
    except DirectWriteError as error:
        refusal = str(error)
    refusals = [f"rank {rank}: {text}" for rank, text in enumerate(gathered(refusal, group)) if text]
    return (None, refusals[0]) if refusals else (recorded, "")


class Reshard:
    """The plan between two layouts over a group of ranks, bound to this rank's parameters and its engine's.

    A rank that only trains has no `engine`, one that only samples no `parameters`. Without a `group` it is the world.
    `sources` and `destinations` are all ranks' layouts, computed; `recorded` is the layout of this rank's engine. Where
    it equals the computed one on every rank, only digests of the plan are exchanged; else the recorded layouts are, and
    replace the computed ones. The constructor is a collective. Raises RuntimeError if ranks make different plans.
    """

    def __init__(
        self,
        sources: Sequence[Layout],
        destinations: Sequence[Layout] | None,
        recorded: Layout,
        parameters: Mapping[str, Tensor],
        engine: nn.Module | None,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        topology: RankTopology,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        rank = rank_in(group)
        as_computed = destinations is not None and set(recorded) == set(destinations[rank])
        self.is_computed = all(gathered(as_computed, group))
        wanted = destinations if self.is_computed and destinations is not None else gathered(recorded, group)
        modules = quantised_modules(engine)
        self.quantises = any(gathered(bool(modules), group))
        """Whether some rank's engine makes FP8 weights of what arrives."""
        plan = make_plan(
            sources,
            wanted,
            itemsize=dtype.itemsize,
            bucket_bytes=bucket_bytes,
            topology=topology,
            bounds_local=self.quantises,
        )
        digests = gathered(plan.digest(), group)
        if len(set(digests)) > 1:
            raise RuntimeError(f"the ranks made different reshard plans: {digests}")
        self._engine = engine
        self._live = dict(engine.named_parameters()) if engine is not None else {}
        self._dtype, self._group = dtype, group
        here = device_of([*parameters.values(), *self._live.values()])
        self._room = WaitingRoom(
            modules,
            plan,
            recorded,
            dtype=dtype,
            device=here,
            collective=nullcontext if group is None else in_own_world,
        )
        made = {name for module in modules for name in module.live}
        plain = {name: parameter for name, parameter in self._live.items() if name not in made}
        self._plan = plan.for_rank(rank)
        self._bound: Any = (self._plan, parameters, plain | self._room.destinations)
        arrived = self._room.arrived if modules else None
        with self._room.opened():
            self._transport = Transport(*self._bound, dtype=dtype, group=group, arrived=arrived)

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Move all weights, in lockstep with the other ranks. Returns seconds and bytes by stage."""
        if self._engine is not None:
            zero_padding(self._engine)
        with self._room.opened(QuantisedModule.write):
            return self._transport.reshard()

    @torch.no_grad()
    def verify(self) -> None:
        """Compare checksums of live parameters with the trainer's. Raises MegarlError with the first that differs.

        Weights that engines quantise are sent once more, and quantised to be compared.
        """
        taken: dict[Transfer, Tensor] = {}
        differing: list[str] = []
        if self.quantises:
            self._compare(taken, differing)
        verify(*self._bound, dtype=self._dtype, group=self._group, taken=taken, differing=differing)

    def _compare(self, taken: dict[Transfer, Tensor], differing: list[str]) -> None:
        """Send all weights again; `taken` gets the checksums at this rank, `differing` the names of live parameters."""
        _, _, destinations = self._bound
        waiting: dict[str, list[Transfer]] = defaultdict(list)

        def take(transfer: Transfer) -> None:
            storage = destinations[transfer.destination.storage]
            view = strided_view(storage, transfer.destination, transfer.shape, transfer.name)
            taken[transfer] = checksum(view, self._dtype)

        for bucket in self._plan.buckets:
            for transfer in (*bucket.local, *bucket.receives):
                if transfer.destination.storage in self._room.destinations:
                    waiting[transfer.destination.storage].append(transfer)
                else:
                    # Before it is written again.
                    take(transfer)

        def compare(module: QuantisedModule, weights: Mapping[str, Tensor]) -> None:
            for name in weights:
                for transfer in waiting[name]:
                    take(transfer)
            differing.extend(module.differing(weights))

        with self._room.opened(compare):
            self._transport.reshard()

    @torch.no_grad()
    def self_test(self) -> dict[str, float]:
        """Fill the engine's parameters with NaN, reshard, compare. Raises MegarlError with the first that differs.

        Returns the reshard's seconds and bytes, and the comparison's `verify_seconds`.
        """
        for parameter in self._live.values():
            spoil(parameter)
        report = self.run()
        started = time.perf_counter()
        self.verify()
        report["verify_seconds"] = time.perf_counter() - started
        for name, parameter in self._live.items():
            if is_spoilt(parameter):
                raise MegarlError(
                    f"rank {rank_in(self._group)}: no reshard reaches all of the engine's parameter {name}."
                )
        return report


class GatheredReshard:
    """A reshard through full tensors and vLLM's loader `load`, for engines that convert their weights.

    The engine's weights are converted, so that no bytes can be compared: `reshard.probe` compares log-probs instead.

    A rank without `load` has no engine and only sends. `sources` are all ranks' layouts; ranks from `first_engine` on
    have engines. Memory beside the staging: full tensors of `bucket_bytes`, at least one tensor.
    """

    def __init__(
        self,
        sources: Sequence[Layout],
        shape: ModelShape,
        parameters: Mapping[str, Tensor],
        load: LoadTensors | None,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        topology: RankTopology,
        first_engine: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._parameters, self._load, self._dtype, self._group = parameters, load, dtype, group
        num_engines = len(topology) - first_engine
        groups: list[dict[str, tuple[int, ...]]] = []
        filled = bucket_bytes
        for name, size in hf_tensors(shape).items():
            if filled + prod(size) * dtype.itemsize > bucket_bytes:
                groups.append({})
                filled = 0
            groups[-1][name] = size
            filled += prod(size) * dtype.itemsize

        def plan(tensors: Mapping[str, tuple[int, ...]]) -> Plan:
            full = tuple(dense_piece(name, size, name, 0) for name, size in tensors.items())
            wanted: list[Layout] = [()] * first_engine + [full] * num_engines
            return make_plan(sources, wanted, itemsize=dtype.itemsize, bucket_bytes=bucket_bytes, topology=topology)

        self._groups = [(tensors, plan(tensors).for_rank(rank_in(group))) for tensors in groups]

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Load all weights, in lockstep with the other ranks. Returns seconds and bytes by stage."""
        report: dict[str, float] = {}
        if self._load is not None:
            self._load(self._gathered(report))
        else:
            deque(self._gathered(report), maxlen=0)
        return report

    def self_test(self) -> dict[str, float]:
        """Load all weights once. Returns the reshard's seconds and bytes."""
        return self.run()

    def _gathered(self, report: dict[str, float]) -> Iterator[tuple[str, Tensor]]:
        here = device_of(list(self._parameters.values()))
        for tensors, plan in self._groups:
            wanted = tensors if self._load is not None else {}
            full = {name: torch.empty(size, dtype=self._dtype, device=here) for name, size in wanted.items()}
            transport = Transport(plan, self._parameters, full, dtype=self._dtype, group=self._group)
            for key, value in transport.reshard().items():
                report[key] = report.get(key, 0.0) + value
            yield from full.items()
