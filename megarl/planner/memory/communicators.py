"""GPU memory of NCCL's communicators: how many a rank has, of which kind, and the bytes of each.

NCCL connects peers at the first call that needs them, so the bytes depend on the calls. Collectives connect rings and
trees. Sends and receives (all-to-all, pipeline stages, reshards) connect pairs of ranks by more channels. Sources are
measurements in NVIDIA/nccl's issues. Nothing was measured with megarl on several GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass

from megarl.config.parallel import ParallelConfig

_MIB = 1 << 20
PAIR_BYTES, GROUP_BYTES = 544 * _MIB, 688 * _MIB
"""Bytes of a communicator of two ranks, and of more ranks, after an all-reduce. Source: NVIDIA/nccl issue 964, four
A100 with NVLink. With NCCL 2.22 and newer they are upper bounds, because unused algorithms are not connected."""
CHANNEL_BYTES = 12 * _MIB
"""Bytes of a channel for sends to and receives from one peer: buffers of 10 and 2 MiB. Source: NVIDIA/nccl issue
1685."""
CHANNELS_ON_NODE, CHANNELS_BETWEEN_NODES = 32, 2
"""Channels to a peer of the same node, if the whole group is on one node, or if the group spans nodes. Sources:
NVIDIA/nccl issues 1685 (eight H100: 3.28 GB more after the first all-to-all, so 0.47 GB a peer) and 1189."""
NETWORK_BYTES = 512 * _MIB
"""Bytes of the buffer shared by sends to and receives from other nodes. Source: NVIDIA/nccl issues 1450 and 2363."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group of a rank and its use of NCCL."""

    name: str
    num_ranks: int
    _: KW_ONLY
    has_collectives: bool = True
    num_peers: int = 0
    """Ranks of the same node that this rank sends to or receives from."""
    spans_nodes: bool = False
    """Whether the ranks that send and receive are on several nodes."""

    @property
    def num_bytes(self) -> int:
        """Return the communicator's bytes on a GPU. A group of one rank has none."""
        if self.num_ranks < 2:
            return 0
        collectives = (PAIR_BYTES if self.num_ranks == 2 else GROUP_BYTES) * self.has_collectives
        channels = CHANNELS_BETWEEN_NODES if self.spans_nodes else CHANNELS_ON_NODE
        return collectives + channels * CHANNEL_BYTES * self.num_peers + NETWORK_BYTES * self.spans_nodes


def communicators_of(
    parallel: ParallelConfig,
    ranks_per_node: int,
    *,
    has_trainer: bool,
    has_engine: bool,
    has_experts: bool,
    is_distributed: bool = True,
    shares_embedding: bool = False,
    balance_losses: Collection[str] = (),
    gathers_matrices: bool = False,
) -> list[Communicator]:
    """Return the communicators, of two or more ranks, of a rank that trains, samples, or both.

    `is_distributed`: data-parallel ranks share the optimizer's states. `shares_embedding`: the rank is on the first or
    last stage, and both have the embedding. `balance_losses`: losses that balance the experts. `gathers_matrices`: the
    optimizer gathers whole matrices from the ranks of a stage.
    """
    communicators: list[Communicator] = []
    if has_trainer:
        communicators += _trainer(parallel, ranks_per_node)
        communicators += _gradient_norm(parallel, has_experts=has_experts, is_distributed=is_distributed)
        if gathers_matrices:
            communicators.append(_matrices(parallel, ranks_per_node))
        if shares_embedding:
            communicators.append(Communicator("embedding", min(2, parallel.pp)))
        if has_experts:
            communicators += _experts(parallel, ranks_per_node)
            communicators += _balance(parallel, balance_losses)
    if has_engine:
        communicators.append(Communicator("engine's tensor parallelism", parallel.rollout_tp))
        if not has_trainer:
            communicators.append(Communicator("engine's world", parallel.rollout_tp))
    if has_engine or parallel.is_separate:
        communicators.append(_reshard(parallel, ranks_per_node, has_experts=has_experts))
    return [communicator for communicator in communicators if communicator.num_bytes]


def _trainer(parallel: ParallelConfig, ranks_per_node: int) -> Iterator[Communicator]:
    yield Communicator("tensor parallelism", parallel.tp)
    yield Communicator("context parallelism", parallel.cp)
    yield Communicator("data and context parallelism", parallel.dp * parallel.cp)
    yield Communicator("all trainers", parallel.world_size)
    # Megatron's order puts pipeline stages as far apart as it can; rank_order may bring them closer.
    is_near = parallel.world_size <= ranks_per_node
    yield Communicator(
        "pipeline parallelism",
        parallel.pp,
        has_collectives=False,
        num_peers=min(2, parallel.pp - 1) if is_near else 0,
        spans_nodes=not is_near,
    )


def _gradient_norm(parallel: ParallelConfig, *, has_experts: bool, is_distributed: bool) -> Iterator[Communicator]:
    """Yield the groups that sum the gradient's norm. With a distributed optimizer all ranks have parts of it."""
    if is_distributed:
        yield Communicator("gradient norm", parallel.world_size)
        return
    yield Communicator("tensor and pipeline parallelism", parallel.tp * parallel.pp)
    if has_experts:
        yield Communicator("experts and pipeline parallelism", parallel.etp * parallel.ep * parallel.pp)


def _matrices(parallel: ParallelConfig, ranks_per_node: int) -> Communicator:
    """Return the process group in which the ranks of a pipeline stage gather whole weight matrices (Muon)."""
    stage = parallel.world_size // parallel.pp
    peers = min(stage, ranks_per_node) - 1
    return Communicator(
        "whole matrices", stage, has_collectives=False, num_peers=peers, spans_nodes=stage > ranks_per_node
    )


def _experts(parallel: ParallelConfig, ranks_per_node: int) -> Iterator[Communicator]:
    experts = parallel.ep * parallel.etp
    yield Communicator(
        "expert parallelism",
        parallel.ep,
        has_collectives=False,
        num_peers=min(parallel.ep, max(1, ranks_per_node // parallel.etp)) - 1,
        spans_nodes=experts > ranks_per_node,
    )
    yield Communicator("expert tensor parallelism", parallel.etp)
    yield Communicator("expert and expert tensor parallelism", experts)
    yield Communicator("data parallelism of experts", parallel.world_size // (experts * parallel.pp))


def _balance(parallel: ParallelConfig, losses: Collection[str]) -> Iterator[Communicator]:
    """Yield the groups that sum the counts of balancing losses.

    Megatron creates each of them in addition to other groups of the same ranks.
    """
    if losses:
        yield Communicator("data parallelism", parallel.dp)
    if "seq_aux_loss" in losses:
        yield Communicator("tensor and context parallelism", parallel.tp * parallel.cp)
    if not {"aux_loss", "global_aux_loss"}.isdisjoint(losses):
        yield Communicator("tensor, data and context parallelism", parallel.world_size // parallel.pp)


def _reshard(parallel: ParallelConfig, ranks_per_node: int, *, has_experts: bool) -> Communicator:
    """Return the group of a reshard. A rank reads from each trainer with a part of its weights."""
    parts = max(parallel.tp // parallel.rollout_tp, parallel.ep * parallel.etp if has_experts else 1, 1)
    # On a colocated rank one of the parts is its own.
    peers = min(parts * parallel.pp, parallel.world_size) - (not parallel.is_separate)
    spans_nodes = parallel.num_ranks > ranks_per_node
    # Ranks are aligned so that parts come from the same node if they can. Separate engines have nodes of their own.
    near = 0 if parallel.is_separate and spans_nodes else min(peers, ranks_per_node - 1)
    return Communicator(
        "reshard",
        parallel.num_ranks if peers else 1,
        has_collectives=False,
        num_peers=near,
        spans_nodes=spans_nodes and peers > 0,
    )
