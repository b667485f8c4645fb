"""Reshard of an EAGLE-3 drafter together with the policy. The drafter has a model folder of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from megarl.reshard.boxes import Layout
from megarl.reshard.layouts.vllm import record_layout
from megarl.reshard.live import DirectReshard, LiveReshard, all_or_none
from megarl.reshard.transport import CopyReport


class ReshardWithDrafter:
    """Copies the policy's weights, then the drafter's. All methods are collectives."""

    def __init__(self, policy: LiveReshard, drafter: DirectReshard) -> None:
        self._policy, self._drafter = policy, drafter
        self.is_probed = policy.is_probed
        """Whether `verify` compares only the drafter's weights, because the policy's cannot be compared."""
        self.converts = policy.converts

    def run(self) -> CopyReport:
        return self._policy.run() + self._drafter.run()

    def verify(self) -> None:
        self._policy.verify()
        self._drafter.verify()

    def self_test(self) -> CopyReport:
        return self._policy.self_test() + self._drafter.self_test()


def record_drafter(
    drafter: nn.Module | None,
    tensors: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> tuple[Layout | None, str]:
    """Record the layout of the drafter in this rank's engine. A collective.

    `tensors` maps the names in the drafter's files to shapes. A rank without an engine passes `drafter` None. Returns
    (layout, ""), or (None, reason) if some rank's drafter cannot be written in place.
    """
    forms = {name: (shape, dtype) for name, shape in tensors.items()}
    return all_or_none(lambda: () if drafter is None else record_layout(drafter, forms), group)
