"""Live reshard: copies the trainer's parameters into the engine's. It is planned once and executed at every step.

`DirectReshard` writes an engine's live parameters in place, if necessary through a `Conversion`. `GatheredReshard`
passes full tensors to vLLM's own loader, for engines with weights that cannot be written in place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.families.model_tensors import float32_tensors
from megarl.families.shape import ModelShape
from megarl.groups.cross_world import rank_in
from megarl.reshard.boxes import Layout, dense_piece
from megarl.reshard.checks.nan_fill import fill_with_nan, has_nan
from megarl.reshard.checks.verify import LedgerComparison
from megarl.reshard.conversion import ConversionChoice
from megarl.reshard.layouts.packed import checkpoint_tensors, unpack_layout
from megarl.reshard.layouts.vllm import DirectWriteError, record_layout, zero_padding
from megarl.reshard.layouts.vllm_slots import live_parameters
from megarl.reshard.plan import Plan, RankTopology, make_plan
from megarl.reshard.staging import gather_values
from megarl.reshard.transport import CopyReport, Transport, device_of
from megarl.types import MegarlError

LoadTensors = Callable[[Iterable[tuple[str, Tensor]]], None]
"""Function that loads (name, tensor) pairs of a checkpoint into vLLM."""


def record_engine_layout(
    model: nn.Module | None, shape: ModelShape, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> tuple[Layout | None, str]:
    """Record the layout of this rank's engine. A collective over `group` (default: the world).

    Returns (layout, ""), or (None, reason) if some rank's engine cannot be written in place. A rank without an engine
    passes `model` None and gets an empty layout.
    """

    def record_engine() -> Layout:
        """Return the layout of this rank's engine; empty without an engine."""
        if model is None:
            return ()
        dtypes = float32_dtypes(shape)
        tensors = {name: (size, dtypes.get(name, dtype)) for name, size in checkpoint_tensors(shape).items()}
        return unpack_layout(record_layout(model, tensors), shape)

    return all_or_none(record_engine, group)


def all_or_none(record_on_rank: Callable[[], Layout], group: dist.ProcessGroup | None) -> tuple[Layout | None, str]:
    """Record a layout on each rank. Returns (layout, ""), or (None, reason) if some rank cannot. A collective."""
    layout: Layout = ()
    refusal = ""
    try:
        layout = record_on_rank()
    except DirectWriteError as error:
        refusal = str(error)
    refusals = [
        f"rank {rank}: {refusal_text}"
        for rank, refusal_text in enumerate(gather_values(refusal, group))
        if refusal_text
    ]
    return (None, refusals[0]) if refusals else (layout, "")


def float32_dtypes(shape: ModelShape) -> dict[str, torch.dtype]:
    """Return torch.float32 for the checkpoint tensors that are float32 in models of any dtype, by name."""
    return dict.fromkeys(float32_tensors(shape), torch.float32)


class LiveReshard(Protocol):
    """One rank's copies from the trainer's live parameters into the engine's. All methods are collectives."""

    @property
    def is_probed(self) -> bool:
        """Whether `verify` does nothing: the caller must compare log-probs of a prompt instead."""
        ...

    @property
    def converts(self) -> bool:
        """Whether the engine's parameters cannot be compared with the trainer's weights box by box."""
        ...

    def run(self) -> CopyReport: ...

    def verify(self) -> None:
        """Compare the engine's weights with the trainer's. Raises MegarlError naming the first difference."""
        ...

    def self_test(self) -> CopyReport:
        """Copy all weights to the engine for the first time, and compare both ends.

        `verify` of the report: seconds of the comparison.
        """
        ...


class EngineSlots(Protocol):
    """Tensors, by name, that a reshard writes instead of the parameters of an engine's model."""

    tensors: dict[str, Tensor]

    def zero_padding(self) -> None:
        """Zero all elements that no copy writes."""
        ...


class DirectReshard:
    """Copies the trainer's live parameters into the engine's, by a plan over a group of ranks (default: the world).

    A rank that only trains has no `engine`; a rank that only samples has no `parameters`. `sources` and `destinations`
    are the computed layouts of all ranks, `recorded` is the recorded layout of this rank's engine. If computed and
    recorded layouts are equal on every rank, only digests of the plan are exchanged. Otherwise the recorded layouts are
    exchanged and used. With `slots`, these are written, and `engine` is None.

    The constructor is a collective. Raises RuntimeError if ranks make different plans.
    """

    is_probed = False

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
        slots: EngineSlots | None = None,
    ) -> None:
        """Plan the copies, bind them to the tensors, and prepare conversion and verification. A collective."""
        rank = rank_in(group)
        self.is_computed, engine_layouts = _choose_engine_layouts(destinations, recorded, group)
        conversion_choice = ConversionChoice(engine, group)
        self.converts = conversion_choice.is_needed
        """Whether some rank's engine converts received weights."""
        plan = make_plan(
            sources,
            engine_layouts,
            itemsize=dtype.itemsize,
            bucket_bytes=bucket_bytes,
            topology=topology,
            bounds_local=self.converts,
        )
        _refuse_different_plans(plan, group)
        self._engine, self._slots = engine, slots
        self._live: Mapping[str, Tensor] = live_parameters(engine) if engine is not None else {}
        if slots is not None:
            self._live = slots.tensors
        self._group = group
        device = device_of([*parameters.values(), *self._live.values()])
        self._conversion = conversion_choice.make(plan, recorded, dtype=dtype, device=device)
        directly_copied = {name: value for name, value in self._live.items() if name not in self._conversion.converted}
        written_tensors = {**directly_copied, **self._conversion.destinations}
        # `Transport` binds views of the conversion's buffers, which need memory meanwhile.
        with self._conversion.allocate_buffers():
            self._transport = Transport(
                plan.for_rank(rank),
                parameters,
                written_tensors,
                dtype=dtype,
                group=group,
                on_arrival=self._conversion.stage,
            )
        self._comparison = LedgerComparison(plan, rank, parameters, written_tensors, dtype=dtype, group=group)

    @torch.no_grad()
    def run(self) -> CopyReport:
        if self._engine is not None:
            zero_padding(self._engine)
        if self._slots is not None:
            self._slots.zero_padding()
        with self._conversion.writing():
            return self._transport.reshard()

    @property
    def staged_bytes(self) -> int:
        return self._transport.staged_bytes

    def release(self) -> None:
        """Free the staging memory. `verify` still works; copying does not."""
        del self._transport

    @torch.no_grad()
    def verify(self) -> None:
        """Compare the live parameters with the trainer's. Raises MegarlError naming the first difference.

        Converted weights cannot be compared directly, so they are sent and converted again.
        """
        values, differing = self._conversion.compare(self._comparison.engine, self._resend)
        self._comparison.verify(values, differing)

    def _resend(self) -> None:
        # Only conversions send again. Read `self._transport` late, because `release` deletes it.
        self._transport.reshard()

    @torch.no_grad()
    def self_test(self) -> CopyReport:
        """Fill the engine's parameters with NaN, copy all weights, and compare.

        Raises MegarlError naming the first difference.
        """
        for parameter in self._live.values():
            fill_with_nan(parameter)
        copies = self.run()
        started = time.perf_counter()
        self.verify()
        verify_seconds = time.perf_counter() - started
        # The comparison covers planned copies only. A remaining NaN reveals an element without any copy.
        for name, parameter in self._live.items():
            if has_nan(parameter):
                raise MegarlError(
                    f"rank {rank_in(self._group)}: the reshard does not write all of the engine's parameter {name}. "
                    "Please report this with the recipe."
                )
        return CopyReport({**copies.seconds, "verify": verify_seconds}, copies.num_bytes)


def _refuse_different_plans(plan: Plan, group: dist.ProcessGroup | None) -> None:
    # Different plans would deadlock or mix up weights. A digest costs 64 bytes per rank.
    digests = gather_values(plan.digest(), group)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks made different reshard plans: {digests}. Please report this.")


def _group_tensors(shape: ModelShape, dtype: torch.dtype, group_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Return the model's tensor shapes in groups of at most `group_bytes`, or of one larger tensor."""
    groups: list[dict[str, tuple[int, ...]]] = []
    # Pretend that a first group is full, so that the loop opens a new group for the first tensor.
    filled_bytes = group_bytes
    for name, size in checkpoint_tensors(shape).items():
        tensor_bytes = prod(size) * dtype.itemsize
        if filled_bytes + tensor_bytes > group_bytes:
            groups.append({})
            filled_bytes = 0
        groups[-1][name] = size
        filled_bytes += tensor_bytes
    return groups


def _choose_engine_layouts(
    computed: Sequence[Layout] | None, recorded: Layout, group: dist.ProcessGroup | None
) -> tuple[bool, Sequence[Layout]]:
    """Return whether every rank's computed layout equals the recorded one, and the layouts to use. A collective."""
    is_equal = computed is not None and set(recorded) == set(computed[rank_in(group)])
    is_computed = all(gather_values(is_equal, group))
    if is_computed and computed is not None:
        return True, computed
    return False, gather_values(recorded, group)


class GatheredReshard:
    """Passes full tensors to vLLM's loader `load`, for engines that convert their weights.

    `verify` does nothing: `checks.probe` compares log-probs instead. A rank without `load` has no engine and only
    sends. `sources` are the layouts of all ranks; ranks from `first_engine` on have engines. Beyond the staging
    buffers, full tensors of `bucket_bytes`, at least one tensor, must fit in memory.
    """

    is_probed = True
    converts = True

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
        """Plan copies in groups of at most `bucket_bytes`, or of one larger tensor. Engine ranks get whole tensors."""
        self._parameters, self._load, self._dtype, self._group = parameters, load, dtype, group
        self._dtypes = float32_dtypes(shape)
        num_engines = len(topology) - first_engine

        def plan_group(tensors: Mapping[str, tuple[int, ...]]) -> Plan:
            """Return the plan of copies that gives every engine's rank these tensors in full."""
            full_layout = unpack_layout((dense_piece(name, size, name, 0) for name, size in tensors.items()), shape)
            # Ranks before the first engine only send, so they have an empty layout.
            engine_layouts: list[Layout] = [()] * first_engine + [full_layout] * num_engines
            return make_plan(
                sources, engine_layouts, itemsize=dtype.itemsize, bucket_bytes=bucket_bytes, topology=topology
            )

        self._groups = [
            (tensors, plan_group(tensors).for_rank(rank_in(group)))
            for tensors in _group_tensors(shape, dtype, bucket_bytes)
        ]

    @torch.no_grad()
    def run(self) -> CopyReport:
        """Send all groups of tensors to vLLM's loader. A collective."""
        reports: list[CopyReport] = []
        if self._load is not None:
            self._load(self._gather_tensors(reports))
        else:
            # A rank without an engine must still run the generator: its transports are collectives.
            deque(self._gather_tensors(reports), maxlen=0)
        return sum(reports, CopyReport())

    def verify(self) -> None:
        """Do nothing: converted weights have no bytes to compare."""

    def self_test(self) -> CopyReport:
        return self.run()

    def _gather_tensors(self, reports: list[CopyReport]) -> Iterator[tuple[str, Tensor]]:
        """Yield every full tensor with its name, group by group. Append a report per group to `reports`."""
        device = device_of(list(self._parameters.values()))
        for tensors, plan in self._groups:
            shapes = tensors if self._load is not None else {}
            full_tensors = {
                name: torch.empty(size, dtype=self._dtypes.get(name, self._dtype), device=device)
                for name, size in shapes.items()
            }
            transport = Transport(plan, self._parameters, full_tensors, dtype=self._dtype, group=self._group)
            reports.append(transport.reshard())
            yield from full_tensors.items()
