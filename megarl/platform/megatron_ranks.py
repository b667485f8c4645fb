"""Megatron's groups of ranks: permutations beyond its orders of axes, and several sets of groups in one process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def permuted_ranks(rank_of_part: Sequence[int]) -> Iterator[None]:
    """Within it, `initialize_model_parallel` gives rank `rank_of_part[i]` the coordinates of rank i.

    Megatron lists the members of a group in the order of their parts, and torch sorts them unless told otherwise.
    """
    if list(rank_of_part) == list(range(len(rank_of_part))):
        yield
        return
    import torch.distributed as dist
    from megatron.core import parallel_state

    class DealtRanks(parallel_state.RankGenerator):
        def get_ranks(self, token: str) -> list[list[int]]:
            return [[rank_of_part[part] for part in group] for group in super().get_ranks(token)]

    generator, new_group = parallel_state.RankGenerator, dist.new_group
    parallel_state.RankGenerator, dist.new_group = DealtRanks, partial(new_group, sort_ranks=False)
    try:
        yield
    finally:
        parallel_state.RankGenerator, dist.new_group = generator, new_group


class RankGroups:
    """A further set of Megatron's groups, for models in another layout. Empty until a model joins them.

    Megatron keeps its groups, sizes and ranks in module globals, one set a process; within `in_place` they are these.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._module: dict[str, Any] = parallel_state.__dict__
        names = [name for name in self._module if re.fullmatch(r"_[A-Z_]+", name)]
        self._kept: dict[str, Any] = {name: {} if isinstance(self._module[name], dict) else None for name in names}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it Megatron's groups are these; the others are kept meanwhile."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        others = {name: self._module[name] for name in self._kept}
        self._module.update(self._kept)
        self._kept = others
