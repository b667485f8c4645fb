"""Positions of ranks in the parallel grid (tp, cp, dp, pp), as arithmetic on integers.

Megatron numbers its ranks by an order of the grid's axes, fastest axis first. Experts have other axes over the same
ranks. A tensor-parallel group of vLLM is a block of contiguous ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

FP8_BLOCK = 128
"""Block size of block-scaled FP8. A rank's numbers of tokens and hidden channels must be multiples of it."""
EXACT_ROWS = 16
"""An exact matrix product pads its input to a multiple of this number of rows. At other numbers oneDNN's kernels (torch
2.13) round some elements differently. Of 12 numbers tried on an AVX-512 processor, 1 differed, and with two threads
also 2, 3, 33, 129 and 257. Multiples of 16 and 32 did not differ.
"""

RANK_ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
"""Values of trainer.rank_order: Megatron's default, and the order that puts a replica's pipeline stages next to each
other.
"""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Position of a rank in the trainer's parallel grid. `etp`, `ep` and `edp`: its position in the experts' grid."""

    tp: int
    dp: int
    pp: int
    cp: int = 0
    etp: int = 0
    ep: int = 0
    edp: int = 0


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Parallel sizes of trainer and engines. They share ranks, or have separate ranks (`rollout_ranks` above 0).

    The trainer has the run's first ranks, separate engines the last. `vpp` is the number of model chunks per pipeline
    stage. `etp` and `ep` are the sizes for experts. With `rollout_ep`, engines distribute whole experts over ranks,
    instead of splitting each expert. `order` is Megatron's rank order.

    `rank_permutation` (a, b) moves the trainer's ranks, so that neighbouring ranks have distant positions. In each
    block of a * b ranks, rank i * b + j has position j * a + i of the order. (1, 1) changes nothing.
    """

    tp: int
    pp: int
    dp: int
    rollout_tp: int
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    rollout_ep: bool = False
    rollout_ranks: int = 0
    order: str = RANK_ORDERS[0]
    rank_permutation: tuple[int, int] = (1, 1)

    @property
    def trainer_text(self) -> str:
        """The trainer's ranks and sizes in words: `4 ranks: trainer tp 2 * pp 1 * dp 2`."""
        axes = ("tp", "pp", "dp", "cp") if self.cp > 1 else ("tp", "pp", "dp")
        sizes_text = " * ".join(f"{axis} {getattr(self, axis)}" for axis in axes)
        for axis in ("vpp", "ep", "etp"):
            if getattr(self, axis) > 1:
                sizes_text += f", {axis} {getattr(self, axis)}"
        if self.order != RANK_ORDERS[0]:
            sizes_text += f" in order {self.order}"
        if self.rank_permutation != (1, 1):
            num_rows, num_columns = self.rank_permutation
            sizes_text += f", ranks permuted {num_rows} by {num_columns}"
        return f"{self.world_size} ranks: trainer {sizes_text}"

    def __str__(self) -> str:
        """Return the sizes in words: `4 ranks: trainer tp 2 * pp 1 * dp 2, vLLM tp 2 * 2 replicas`."""
        engines_text = f"tp {self.rollout_tp}"
        if self.rollout_ep:
            engines_text += " with expert parallelism"
        engines_text = f"vLLM {engines_text} * {len(self.leaders())} replicas"
        if self.is_separate:
            return f"{self.trainer_text}; {self.rollout_ranks} ranks: {engines_text}"
        return f"{self.trainer_text}, {engines_text}"

    def layers_by_chunk(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers in each of the pp * vpp model chunks, in layer order.

        They differ by at most one. The first chunk has the embedding and the last one the head, so these two get an
        additional layer last.
        """
        num_chunks = self.pp * self.vpp
        least_layers, num_larger = divmod(num_layers, num_chunks)
        larger_chunks = [*range(1, num_chunks - 1), 0, num_chunks - 1][:num_larger]
        return tuple(least_layers + (chunk in larger_chunks) for chunk in range(num_chunks))

    def layers_of_chunks(self, num_layers: int, stage: int) -> list[range]:
        """Return the numbers, from 0, of the layers of each chunk on a pipeline stage."""
        sizes = self.layers_by_chunk(num_layers)
        ends = list(accumulate(sizes))
        # Consecutive chunks are on consecutive stages, so a stage has every pp-th chunk.
        return [range(ends[chunk] - sizes[chunk], ends[chunk]) for chunk in range(stage, len(sizes), self.pp)]

    def layers_on_stage(self, num_layers: int, stage: int) -> list[int]:
        return [layer for chunk in self.layers_of_chunks(num_layers, stage) for layer in chunk]

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def is_separate(self) -> bool:
        return self.rollout_ranks > 0

    @property
    def num_ranks(self) -> int:
        return self.world_size + self.rollout_ranks

    @property
    def replica_sizes(self) -> list[int]:
        """Number of ranks of each separate engine. Empty: trainer and engines share ranks."""
        return [self.rollout_tp] * (self.rollout_ranks // self.rollout_tp)

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's position on each axis of the trainer's grid, and of the experts' grid."""
        dense_coordinates = self._axis_indices(self._dense, self.part(rank))
        expert_coordinates = self._axis_indices(self._expert, self.part(rank))
        return Coordinates(
            tp=dense_coordinates["tp"],
            dp=dense_coordinates["dp"],
            pp=dense_coordinates["pp"],
            cp=dense_coordinates["cp"],
            etp=expert_coordinates["tp"],
            ep=expert_coordinates["ep"],
            edp=expert_coordinates["dp"],
        )

    def rank(self, tp: int, dp: int, pp: int, cp: int = 0) -> int:
        """Return the rank at these coordinates of the trainer's grid."""
        coordinates, part, stride = {"tp": tp, "dp": dp, "pp": pp, "cp": cp, "ep": 0}, 0, 1
        for axis in self.order.split("-"):
            part += coordinates[axis] * stride
            stride *= self._dense[axis]
        # Inverse of `part`: within each block, `part` reads the ranks of a grid by columns instead of rows.
        num_rows, num_columns = self.rank_permutation
        permutation_block, position = divmod(part, num_rows * num_columns)
        return permutation_block * num_rows * num_columns + position % num_rows * num_columns + position // num_rows

    def part(self, rank: int) -> int:
        """Return a rank's position in the trainer's order."""
        num_rows, num_columns = self.rank_permutation
        permutation_block, position = divmod(rank, num_rows * num_columns)
        return permutation_block * num_rows * num_columns + position % num_columns * num_rows + position // num_columns

    @property
    def rank_of_part(self) -> tuple[int, ...]:
        """Rank at each position of the trainer's order, after `rank_permutation`."""
        return tuple(sorted(range(self.world_size), key=self.part))

    def replica_ranks(self, dp: int) -> tuple[int, ...]:
        """Return the tp * pp * cp ranks of a data-parallel replica; the first has tp 0, cp 0, pp 0."""
        # After a permutation, tp 0 may have a higher rank number than its peers, so put the first rank in front.
        first_rank = self.rank(tp=0, dp=dp, pp=0)
        coordinates = product(range(self.tp), range(self.pp), range(self.cp))
        peers = {self.rank(tp=tp, dp=dp, pp=pp, cp=cp) for tp, pp, cp in coordinates} - {first_rank}
        return (first_rank, *sorted(peers))

    def leaders(self) -> tuple[int, ...]:
        """Return the first rank of each vLLM tensor-parallel group, which runs the engine's scheduler."""
        first_rank = self.world_size if self.is_separate else 0
        return tuple(range(first_rank, self.num_ranks, self.rollout_tp))

    # Zigzag context parallelism balances causal attention: each rank has one early and one late chunk.
    @property
    def sequence_multiple(self) -> int:
        """Padded sequences are multiples of these tokens: two chunks per context-parallel rank."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def rows_multiple(self) -> int:
        """Number of micro-batches that the interleaved pipeline schedule processes as one group."""
        return self.pp if self.vpp > 1 else 1

    # Megatron's order strings include ep. It does not split dense weights, so its size is 1 here.
    @property
    def _dense(self) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    @property
    def _expert(self) -> dict[str, int]:
        edp = self.world_size // (self.etp * self.ep * self.pp)
        return {"tp": self.etp, "cp": 1, "ep": self.ep, "dp": edp, "pp": self.pp}

    def _axis_indices(self, sizes: Mapping[str, int], part: int) -> dict[str, int]:
        """Return a position's index on each axis: the digits of a mixed-radix number."""
        assert prod(sizes.values()) == self.world_size, f"{sizes} do not make {self.world_size} ranks"
        indices = {}
        for axis in self.order.split("-"):
            part, indices[axis] = divmod(part, sizes[axis])
        return indices
