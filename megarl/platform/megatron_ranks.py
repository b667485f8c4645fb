"""Permutations of ranks in Megatron's groups, beyond its orders of axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial


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
