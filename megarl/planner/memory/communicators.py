"""GPU memory of NCCL's communicators of a rank.

NCCL connects peers at the first call that needs them. Collectives connect rings and trees. Sends and receives
(all-to-all, pipeline stages, reshards) connect pairs of ranks by more channels. Sources: measurements in NVIDIA/nccl's
issues. Nothing was measured with megarl on several GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass

from megarl.config.parallel import ParallelConfig

_MIB = 1 << 20
PAIR_BYTES, GROUP_BYTES = 544 * _MIB, 688 * _MIB
"""Bytes after an all-reduce of a communicator with two ranks, and with more. Source: NVIDIA/nccl issue 964, four A100
with NVLink. Upper bounds since NCCL 2.22, which does not connect unused algorithms.
"""
CHANNEL_BYTES = 12 * _MIB
"""Bytes of a channel to one peer: buffers of 10 and 2 MiB. Source: NVIDIA/nccl issue 1685."""
CHANNELS_ON_NODE, CHANNELS_BETWEEN_NODES = 32, 2
"""Channels to a peer of the same node: if the group is on one node, and if it spans nodes. Sources: NVIDIA/nccl issues
1685 (eight H100: 3.28 GB more after the first all-to-all, so 0.47 GB a peer) and 1189.
"""
NETWORK_BYTES = 512 * _MIB
"""Bytes of the buffer shared by all traffic to and from other nodes. Source: NVIDIA/nccl issues 1450 and 2363."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group of a rank, and how the rank uses it."""

    name: str
    num_ranks: int
    _: KW_ONLY
    has_collectives: bool = True
    num_peers: int = 0
    """Ranks of the same node with which this rank exchanges messages."""
    spans_nodes: bool = False
    """Whether messages are exchanged between nodes."""

    @property
    def num_bytes(self) -> int:
        """GPU memory of the communicator in bytes; 0 for a group of one rank."""
        if self.num_ranks < 2:
            return 0
        collectives = (PAIR_BYTES if self.num_ranks == 2 else GROUP_BYTES) * self.has_collectives
        channels = CHANNELS_BETWEEN_NODES if self.spans_nodes else CHANNELS_ON_NODE
        return collectives + channels * CHANNEL_BYTES * self.num_peers + NETWORK_BYTES * self.spans_nodes


def list_communicators(
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
    """Return the communicators of two or more ranks to which a rank belongs. The rank trains, samples, or does both.

    `is_distributed`: data-parallel ranks share the optimizer's states. `shares_embedding`: the first and last stage
    both have the embedding, and this rank is on one of them. `balance_losses`: losses that balance the experts.
    `gathers_matrices`: the optimizer gathers whole matrices from the ranks of a stage.
    """
    communicators: list[Communicator] = []
    if has_trainer:
        communicators += _list_trainer_communicators(parallel, ranks_per_node)
        communicators += _list_norm_communicators(parallel, has_experts=has_experts, is_distributed=is_distributed)
        if gathers_matrices:
            communicators.append(_make_matrix_communicator(parallel, ranks_per_node))
        if shares_embedding:
            communicators.append(Communicator("embedding", min(2, parallel.pp)))
        if has_experts:
            communicators += _list_expert_communicators(parallel, ranks_per_node)
            communicators += _list_balance_communicators(parallel, balance_losses)
    if has_engine:
        communicators.append(Communicator("engine's tensor parallelism", parallel.rollout_tp))
        if not has_trainer:
            communicators.append(Communicator("engine's world", parallel.rollout_tp))
    if has_engine or parallel.is_separate:
        communicators.append(_make_reshard_communicator(parallel, ranks_per_node, has_experts=has_experts))
    return [communicator for communicator in communicators if communicator.num_bytes]


def _list_trainer_communicators(parallel: ParallelConfig, ranks_per_node: int) -> Iterator[Communicator]:
    """Yield the groups of a trainer rank that split dense layers."""
    yield Communicator("tensor parallelism", parallel.tp)
    yield Communicator("context parallelism", parallel.cp)
    yield Communicator("data and context parallelism", parallel.dp * parallel.cp)
    yield Communicator("all trainers", parallel.world_size)
    # By default Megatron puts pipeline stages on ranks far apart. rank_order may bring them closer.
    is_on_one_node = parallel.world_size <= ranks_per_node
    yield Communicator(
        "pipeline parallelism",
        parallel.pp,
        has_collectives=False,
        num_peers=min(2, parallel.pp - 1) if is_on_one_node else 0,
        spans_nodes=not is_on_one_node,
    )


def _list_norm_communicators(
    parallel: ParallelConfig, *, has_experts: bool, is_distributed: bool
) -> Iterator[Communicator]:
    """Yield the groups that sum the gradient's norm."""
    # With a distributed optimizer, each rank has a part of the gradient.
    if is_distributed:
        yield Communicator("gradient norm", parallel.world_size)
        return
    yield Communicator("tensor and pipeline parallelism", parallel.tp * parallel.pp)
    if has_experts:
        yield Communicator("experts and pipeline parallelism", parallel.etp * parallel.ep * parallel.pp)


def _make_matrix_communicator(parallel: ParallelConfig, ranks_per_node: int) -> Communicator:
    """Describe the group in which the ranks of a pipeline stage gather whole weight matrices for Muon."""
    stage_ranks = parallel.world_size // parallel.pp
    num_peers = min(stage_ranks, ranks_per_node) - 1
    return Communicator(
        "whole matrices",
        stage_ranks,
        has_collectives=False,
        num_peers=num_peers,
        spans_nodes=stage_ranks > ranks_per_node,
    )


def _list_expert_communicators(parallel: ParallelConfig, ranks_per_node: int) -> Iterator[Communicator]:
    """Yield the groups of a trainer rank that split experts, or sum the gradients of experts."""
    expert_ranks = parallel.ep * parallel.etp
    yield Communicator(
        "expert parallelism",
        parallel.ep,
        has_collectives=False,
        num_peers=min(parallel.ep, max(1, ranks_per_node // parallel.etp)) - 1,
        spans_nodes=expert_ranks > ranks_per_node,
    )
    yield Communicator("expert tensor parallelism", parallel.etp)
    yield Communicator("expert and expert tensor parallelism", expert_ranks)
    yield Communicator("data parallelism of experts", parallel.world_size // (expert_ranks * parallel.pp))


def _list_balance_communicators(parallel: ParallelConfig, losses: Collection[str]) -> Iterator[Communicator]:
    """Yield the groups that sum token counts. Megatron creates them even if other groups have the same ranks."""
    if losses:
        yield Communicator("data parallelism", parallel.dp)
    if "seq_aux_loss" in losses:
        yield Communicator("tensor and context parallelism", parallel.tp * parallel.cp)
    if not {"aux_loss", "global_aux_loss"}.isdisjoint(losses):
        yield Communicator("tensor, data and context parallelism", parallel.world_size // parallel.pp)


def _make_reshard_communicator(parallel: ParallelConfig, ranks_per_node: int, *, has_experts: bool) -> Communicator:
    """Return the group of a reshard. A rank reads from every trainer rank that has a shard of its weights."""
    num_shards = max(parallel.tp // parallel.rollout_tp, parallel.ep * parallel.etp if has_experts else 1, 1)
    # A colocated rank has one of the shards itself.
    num_peers = min(num_shards * parallel.pp, parallel.world_size) - (not parallel.is_separate)
    spans_nodes = parallel.num_ranks > ranks_per_node
    # The order of ranks puts shards on the same node where possible. Separate engines have nodes of their own.
    num_peers_on_node = 0 if parallel.is_separate and spans_nodes else min(num_peers, ranks_per_node - 1)
    return Communicator(
        "reshard",
        parallel.num_ranks if num_peers else 1,
        has_collectives=False,
        num_peers=num_peers_on_node,
        spans_nodes=spans_nodes and num_peers > 0,
    )
