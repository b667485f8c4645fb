"""Rows of arrays from every rank to every other, in numbers that both sides know."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


def exchanged(values: NDArray[Any], num_sent: NDArray[np.int64], num_received: NDArray[np.int64]) -> NDArray[Any]:
    """Rows [sum of num_received, ...] from all ranks in order, for [sum of num_sent, ...] to all ranks in order.

    A collective over the world, from host to host.
    """
    row_bytes = values.itemsize * int(np.prod(values.shape[1:]))
    received = np.empty((int(num_received.sum()), *values.shape[1:]), values.dtype)
    # As bytes: gloo has no collective of int16.
    dist.all_to_all_single(
        torch.from_numpy(received.reshape(-1).view(np.uint8)),
        torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8)),
        (num_received * row_bytes).tolist(),
        (num_sent * row_bytes).tolist(),
    )
    return received
