"""Exchanges of array rows between all ranks: sent in known numbers, or requested by the receiving rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


def exchange_rows(values: NDArray[Any], num_sent: NDArray[np.int64], num_received: NDArray[np.int64]) -> NDArray[Any]:
    """Send rows to all ranks, and return the received rows in rank order: [sum of num_received, ...].

    `values` [sum of num_sent, ...] are in rank order. `num_sent` and `num_received` are [ranks]. A collective over the
    world, from host to host.
    """
    row_bytes = values.itemsize * int(np.prod(values.shape[1:]))
    received = np.empty((int(num_received.sum()), *values.shape[1:]), values.dtype)
    # gloo (torch 2.13) has no collective for int16, so rows are sent as bytes.
    dist.all_to_all_single(
        torch.from_numpy(received.reshape(-1).view(np.uint8)),
        torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8)),
        (num_received * row_bytes).tolist(),
        (num_sent * row_bytes).tolist(),
    )
    return received


def fetch_values(
    runs: NDArray[np.int64],
    holders: NDArray[np.int64],
    read_values: Callable[[int, int, int, int], NDArray[Any]],
    empty: NDArray[Any],
) -> NDArray[Any]:
    """Fetch values of runs of tokens from the ranks that store them: [tokens, ...], in the order of `runs`.

    `runs` [runs, 3] lists sequence number, first token and end; `holders` [runs] the rank storing each run.
    `read_values(rank, number, first, end)` returns what this rank stores, for the requesting rank. `empty` [0, ...] has
    the dtype and trailing shape of the result. A collective over the world.
    """
    world_size = dist.get_world_size()
    # `exchange_rows` expects rows in rank order.
    holder_order = np.argsort(holders, kind="stable")
    requested_runs = runs[holder_order]
    num_requested = np.bincount(holders, minlength=world_size)
    one_row_each = np.ones_like(num_requested)
    # All ranks exchange the numbers of requests, then the requests, then the values.
    num_requests_from = exchange_rows(num_requested[:, None], one_row_each, one_row_each)[:, 0]
    requests_from = np.split(
        exchange_rows(requested_runs, num_requested, num_requests_from), np.cumsum(num_requests_from)[:-1]
    )
    answers_by_rank = [
        [read_values(rank, *run).ravel() for run in requests.tolist()] for rank, requests in enumerate(requests_from)
    ]
    num_sent = np.array([sum(values.size for values in rank_answers) for rank_answers in answers_by_rank])
    run_lengths = requested_runs[:, 2] - requested_runs[:, 1]
    value_shape = empty.shape[1:]
    num_requested_tokens = np.bincount(holders[holder_order], run_lengths, world_size).astype(np.int64)
    sent_values = np.concatenate(
        [empty.ravel(), *(values for rank_answers in answers_by_rank for values in rank_answers)]
    )
    received_values = exchange_rows(sent_values, num_sent, num_requested_tokens * int(np.prod(value_shape)))
    # Restore the order of the runs. Values may have no elements: a pipeline stage of dense layers has no experts.
    values_of_runs = np.split(received_values.reshape(run_lengths.sum(), *value_shape), np.cumsum(run_lengths)[:-1])
    return np.concatenate([empty, *(values_of_runs[run_index] for run_index in np.argsort(holder_order))])


def token_runs(keys: NDArray[np.int64], sequence: NDArray[np.int64], token: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the runs of consecutive tokens, one row each: the sequence's key, the first token, the last token + 1.

    `keys` [sequences, numbers of a key] identify sequences. `sequence` and `token` [tokens]: the index of a token's
    sequence, and its place there. Returns [runs, numbers of a key + 2].
    """
    continues_run = (np.diff(sequence) == 0) & (np.diff(token) == 1)
    # The slices cover the case without tokens.
    first_indices = np.flatnonzero(np.concatenate([[True], ~continues_run])[: len(token)])
    last_indices = np.append(first_indices[1:], len(token))[: len(first_indices)] - 1
    return np.column_stack([keys[sequence[first_indices]], token[first_indices], token[last_indices] + 1])
