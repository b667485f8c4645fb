"""Conversion of received weights into an engine's own format, such as FP8, chosen when the reshard is planned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.reshard.boxes import Layout
from megarl.reshard.checks.ledger import Ledger
from megarl.reshard.layouts.vllm_quantised import quantised_modules
from megarl.reshard.plan import Plan
from megarl.reshard.quantised import QuantisingConversion
from megarl.reshard.staging import gather_values
from megarl.reshard.transport import BucketStage


class Conversion(Protocol):
    """Converts received weights on one rank whose engine stores them in another format than the trainer."""

    destinations: Mapping[str, Tensor]
    """Buffers for received weights, by name."""
    converted: Collection[str]
    """Names of the live parameters computed from these buffers. No copy writes them directly."""
    stage: BucketStage | None
    """Work after each bucket of weights has arrived."""

    def allocate_buffers(self) -> AbstractContextManager[None]:
        """Return a context in which the buffers have memory."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which `stage` writes the live parameters."""
        ...

    def compare(self, ledger: Ledger, send: Callable[[], object]) -> tuple[dict[int, Tensor], list[str]]:
        """Send all weights again with `send`, convert them, and compare them with the live parameters. A collective.

        Returns the checksum of each piece of `ledger` by index, int64 [scalar], and the names of differing parameters.
        """
        ...


class SameFormat:
    """No conversion: all engines store weights as they are sent."""

    destinations: Mapping[str, Tensor] = {}
    converted: Collection[str] = ()
    stage: BucketStage | None = None

    def allocate_buffers(self) -> AbstractContextManager[None]:
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compare(self, ledger: Ledger, send: Callable[[], object]) -> tuple[dict[int, Tensor], list[str]]:
        """Return the checksum of each piece of `ledger` in the live parameters by index, int64 [scalar]. Without
        conversion nothing is sent again.
        """
        return ledger.compute(), []


class ConversionChoice:
    """Chooses between `SameFormat` and a conversion.

    The constructor asks all ranks of `group` whether an engine converts.
    """

    def __init__(self, engine: nn.Module | None, group: dist.ProcessGroup | None) -> None:
        self._modules, self._group = quantised_modules(engine), group
        self.is_needed = any(gather_values(bool(self._modules), group))

    def make(self, plan: Plan, layout: Layout, *, dtype: torch.dtype, device: torch.device) -> Conversion:
        if not self.is_needed:
            return SameFormat()
        return QuantisingConversion(self._modules, plan, layout, dtype=dtype, device=device, group=self._group)
