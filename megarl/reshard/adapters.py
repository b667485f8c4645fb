"""Reshard of a LoRA adapter alone: the engine keeps the base weights and receives only the matrices A and B."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from megarl.reshard.boxes import Layout
from megarl.reshard.layouts.vllm_slots import AdapterSlots
from megarl.reshard.live import DirectReshard, all_or_none
from megarl.reshard.transport import CopyReport


class AdapterReshard:
    """Copies the base weights once, with the reshard `base`. Later it copies only the LoRA matrices A and B.

    `plan_adapter` returns the reshard of the matrices. Call `self_test` before all other methods.
    """

    is_probed = False
    converts = True
    _adapter: DirectReshard

    def __init__(self, base: DirectReshard, plan_adapter: Callable[[], DirectReshard]) -> None:
        self._base, self._plan_adapter = base, plan_adapter

    @property
    def is_computed(self) -> bool:
        """Whether vLLM's recorded layouts of weights and slots equal the computed layouts on every rank."""
        return self._base.is_computed and self._adapter.is_computed

    @property
    def staged_bytes(self) -> int:
        return self._adapter.staged_bytes

    def run(self) -> CopyReport:
        return self._adapter.run()

    def verify(self) -> None:
        """Compare the engine's base weights and adapter slots with the trainer's.

        Raises MegarlError naming the first difference.
        """
        self._base.verify()
        self._adapter.verify()

    def self_test(self) -> CopyReport:
        """Fill base weights and adapter slots with NaN, copy both, and compare. The report sums both copies.

        Frees the staging memory of the base weights: they cannot be copied again. Raises MegarlError naming the first
        difference.
        """
        base_copies = self._base.self_test()
        # Free the base weights' staging memory first: together with the adapter's it could exceed the device's memory.
        self._base.release()
        self._adapter = self._plan_adapter()
        return base_copies + self._adapter.self_test()


def record_slots(
    slots: AdapterSlots | None,
    tensors: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
) -> tuple[Layout | None, str]:
    """Record the layout of an adapter's slots in this rank's engine. A collective over `group` (default: the world).

    `tensors` maps the adapter's matrices to shapes. A rank without an engine passes `slots` None. Returns (layout, ""),
    or (None, reason) if some rank's slots cannot be written in place.
    """
    return all_or_none(lambda: () if slots is None else slots.record_layout(tensors, dtype), group)
