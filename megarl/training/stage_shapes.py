"""Point-to-point communication of pipeline stages, with shapes known before the pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

Shape = tuple[int, int, int]
"""Shape of a microbatch's hidden states on one rank: tokens, 1, hidden size."""


class StageCommunicator(P2PCommunicator):
    """Sends hidden states and gradients between pipeline stages. Their shapes are computed on the host.

    Packed rows differ in length. Megatron-Core 0.16.1 sends each shape before its tensor, and the host waits to read it
    from the device. Each rank knows the lengths of all rows, so this class sends no shapes.

    `shapes` [microbatches] has one shape for each row. Use a new object for each call of a Megatron schedule.
    """

    def __init__(self, config: ModelParallelConfig, shapes: Sequence[Shape], num_chunks: int) -> None:
        group: Any = parallel_state.get_pipeline_model_parallel_group()
        super().__init__(group, config)
        table = get_schedule_table(len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage)
        # Stages receive microbatches in the order in which they process them, forward and backward. The first stage
        # receives nothing for its first chunk; backward, the last stage receives nothing for its last chunk.
        after_first = [shapes[microbatch] for microbatch, chunk in table if chunk > 0]
        all_shapes = [shapes[microbatch] for microbatch, _ in table]
        self._from_previous = deque(after_first if group.rank() == 0 else all_shapes)
        self._from_next = deque(after_first if group.rank() == group.size() - 1 else all_shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> Any:
        """Return the shapes of the next tensors from the previous and the next stage; None without a reception.

        Megatron calls this method before each exchange if `variable_seq_lengths` is on.
        """
        from_previous = self._from_previous.popleft() if recv_prev else None
        return from_previous, self._from_next.popleft() if recv_next else None


def stage_groups() -> ProcessGroupCollection:
    """Return the process groups that Megatron's schedules need with a communicator."""
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"])
