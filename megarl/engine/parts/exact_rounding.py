"""Exact rounding in an engine (`trainer.exact`)."""

from __future__ import annotations

from typing import Any

from megarl.engine.parts.engine_part import EnginePart
from megarl.platform.exact import engine as exact_engine


class ExactRounding(EnginePart):
    """Part that makes an engine round as `models.exact` does. Products are split into `num_blocks` blocks over all
    ranks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def prepare(self) -> None:
        exact_engine.fix_attention_order()

    def build(self, worker: Any, *, is_leader: bool) -> None:
        exact_engine.round_exactly(worker.get_model(), self._num_blocks)
