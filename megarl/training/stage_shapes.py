"""Messages between pipeline stages, with shapes computed before the pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.models.policy import StateCarrier

Shape = tuple[int, int, int]
"""Shape of a microbatch's hidden states on one rank: tokens, 1, hidden size."""


class StageCommunicator(P2PCommunicator):
    """Sends hidden states and gradients between pipeline stages, without sending their shapes.

    Packed rows differ in length. So Megatron-Core 0.16.1 sends each shape before its tensor, and the host waits for it.
    Here every rank computes the shapes from the lengths of all rows.

    `shapes` [microbatches] has one shape per row. `carriers` [chunks] send carried states of this stage's chunks,
    stacked on the hidden states; None: no carried states. Use a new object for each call of a Megatron schedule.
    """

    def __init__(
        self, config: ModelParallelConfig, shapes: Sequence[Shape], carriers: Sequence[StateCarrier | None]
    ) -> None:
        """Compute the shapes that this stage receives, in the schedule's order."""
        group: Any = parallel_state.get_pipeline_model_parallel_group()
        super().__init__(group, config)
        schedule_table = get_schedule_table(len(shapes), len(carriers), config.microbatch_group_size_per_vp_stage)
        num_received = [carrier.num_received if carrier else 0 for carrier in carriers]
        num_sent = [carrier.num_sent if carrier else 0 for carrier in carriers]
        # Stages receive microbatches in the order in which they process them, forward and backward. Forward, the first
        # stage receives nothing for its first chunk. Backward, the last stage receives nothing for its last chunk. The
        # table counts chunks in the order of the forward pass; in the backward pass the last chunk comes first.
        self._from_previous = deque(
            _message_shape(shapes[microbatch], num_received[chunk])
            for microbatch, chunk in schedule_table
            if chunk > 0 or group.rank() > 0
        )
        self._from_next = deque(
            _message_shape(shapes[microbatch], num_sent[-1 - chunk])
            for microbatch, chunk in schedule_table
            if chunk > 0 or group.rank() < group.size() - 1
        )

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> Any:
        """Return the shapes of the next tensors from the previous and the next stage; None: none is received.

        Megatron calls this before each exchange if `variable_seq_lengths` is on.
        """
        from_previous = self._from_previous.popleft() if recv_prev else None
        return from_previous, self._from_next.popleft() if recv_next else None


def _message_shape(shape: Shape, num_carried: int) -> tuple[int, ...]:
    return (1 + num_carried, *shape) if num_carried else shape


def stage_groups() -> ProcessGroupCollection:
    """Return the process groups for `pg_collection` of Megatron's pipeline schedules.

    The schedules require them if they are given a `p2p_communicator`.
    """
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"])
