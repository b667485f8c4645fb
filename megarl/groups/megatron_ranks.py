"""Extensions of Megatron's parallel groups: any permutation of ranks, and several sets of groups per process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.groups.backends import require_gpu_backend

if TYPE_CHECKING:
    import torch


@contextmanager
def permuted_ranks(rank_of_part: Sequence[int]) -> Iterator[None]:
    """Context in which `initialize_model_parallel` gives rank `rank_of_part[i]` the parallel coordinates of rank i."""
    if list(rank_of_part) == list(range(len(rank_of_part))):
        yield
        return
    import torch.distributed as dist
    from megatron.core import parallel_state

    class PermutedRanks(parallel_state.RankGenerator):
        def get_ranks(self, token: str) -> list[list[int]]:
            """Return the groups of one kind (`token`: tp, dp, ...), with the permuted ranks."""
            return [[rank_of_part[part] for part in group] for group in super().get_ranks(token)]

    # Megatron-Core 0.16.1 lists a group's members by coordinates. torch sorts them by rank unless sort_ranks is False.
    generator, new_group = parallel_state.RankGenerator, dist.new_group
    parallel_state.RankGenerator, dist.new_group = PermutedRanks, partial(new_group, sort_ranks=False)
    try:
        yield
    finally:
        parallel_state.RankGenerator, dist.new_group = generator, new_group


def require_gpu_backends(device: torch.device) -> None:
    """Raise GlooOnlyGroupError for the first Megatron group that would send tensors on `device` over gloo."""
    from megatron.core import parallel_state
    from torch.distributed import ProcessGroup

    for name, group in vars(parallel_state).items():
        if isinstance(group, ProcessGroup):
            require_gpu_backend(group, name.lstrip("_"), device)


class RankGroups:
    """A second set of Megatron's parallel groups, for a model with other parallel sizes than the policy. It starts
    empty.

    Megatron-Core 0.16.1 has one set per process, in module globals: groups, sizes and ranks. `in_place` swaps the two.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._module: dict[str, Any] = parallel_state.__dict__
        # Megatron's state has names like _TENSOR_MODEL_PARALLEL_GROUP; its functions and classes do not.
        names = [name for name in self._module if re.fullmatch(r"_[A-Z_]+", name)]
        self._saved: dict[str, Any] = {name: {} if isinstance(self._module[name], dict) else None for name in names}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which Megatron uses this set of groups. At its end Megatron's first set is restored."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        current = {name: self._module[name] for name in self._saved}
        self._module.update(self._saved)
        self._saved = current
