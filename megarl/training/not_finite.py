"""Search for the first tensor that is not finite, in a second pass over the rows of a skipped update."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.data.token_batch import TokenBatch
from megarl.tracking.model_outputs import NotFinite, Place
from megarl.training.model import ModelShard
from megarl.training.module_trace import ModuleTrace, list_chunk_numbers, make_model_namer
from megarl.training.objective import RowLoss
from megarl.training.rows.metrics import losses_of, read_metrics

_KINDS = ("weight", "output", "loss", "gradient")
"""Kinds of tensors, causes before effects."""
_NAME_BYTES = 160
"""Maximum bytes of an exchanged name. Megatron's names are shorter than 100."""
_MAY_BE_NAN = ("old_logprobs", "rollout_logprobs")
"""Arrays of a batch in which NaN means a missing value."""


def find_not_finite(model: ModelShard, rows: Sequence[TokenBatch], objective: Callable[..., RowLoss]) -> NotFinite:
    """Compute the rows again, and return the first tensor that is not finite.

    A collective over the trainer's ranks. Search order: weights; outputs of modules, by microbatch and position in the
    model; losses; each rank's own gradients, from the last layer to the first. Gradient buffers are zeroed; weights and
    optimizer stay. Dropout draws new masks.
    """
    trace = ModuleTrace(model.chunks, _flag_not_finite)
    saved_buffers = {buffer: buffer.clone() for chunk in model.chunks for buffer in chunk.buffers()}
    with _skip_reduction(model):
        with trace.recording(), torch.enable_grad():
            row_metrics = read_metrics(get_forward_backward_func()(**model.schedule_arguments(rows, objective)))
        model.release_feeds()
        losses_by_row = [losses_of(row) for row in row_metrics]
        first_candidate = next(_list_candidates(model, rows, trace, losses_by_row), None)
    # Routers count tokens per expert in buffers. The second pass must not count.
    for buffer, values in saved_buffers.items():
        buffer.copy_(values)
    return _find_first_finding(first_candidate, model.device)


@contextmanager
def _skip_reduction(model: ModelShard) -> Iterator[None]:
    """Context in which gradients are not reduced over ranks. Gradient buffers are zero before and after."""
    config: Any = model.config
    # Only a trained model has updates, so its chunks are wrapped with gradient buffers.
    wrapped: Any = model.models
    saved_functions = config.finalize_model_grads_func, config.no_sync_func
    with ExitStack() as stack:
        for chunk in wrapped:
            chunk.zero_grad_buffer()
            stack.enter_context(chunk.no_sync())
        config.finalize_model_grads_func = config.no_sync_func = None
        try:
            yield
        finally:
            config.finalize_model_grads_func, config.no_sync_func = saved_functions
            for chunk in wrapped:
                chunk.zero_grad_buffer()


def _flag_not_finite(values: Tensor) -> Tensor:
    """Return int64 [] on the device: 1 if a value [*shape] is not finite, else 0."""
    return values.isfinite().all().logical_not().long()


def _list_candidates(
    model: ModelShard, rows: Sequence[TokenBatch], trace: ModuleTrace, losses: Sequence[Sequence[float]]
) -> Iterator[tuple[str, Place, str]]:
    """Yield this rank's tensors that are not finite, in search order: kind, place and name."""
    chunks = list(zip(list_chunk_numbers(len(model.chunks)), model.chunks, strict=True))
    for chunk_number, chunk in chunks:
        weights = dict(chunk.named_parameters())
        yield from _find_not_finite_tensors("weight", chunk_number, weights, make_model_namer(chunk))
    yield from (("output", output.place, output.name) for output in trace.outputs() if output.number)
    for row, row_losses in enumerate(losses):
        if not np.isfinite(row_losses).all():
            faulty_arrays = ", ".join(_find_faulty_arrays(rows[row].per_token, rows[row].loss_mask))
            yield (
                "loss",
                Place(row, 0, 0),
                f"of microbatch {row}" + (f", from the batch's {faulty_arrays}" if faulty_arrays else ""),
            )
    for chunk_number, chunk in reversed(chunks):
        trained: dict[str, Any] = {
            name: parameter for name, parameter in chunk.named_parameters() if parameter.requires_grad
        }
        gradients = {name: parameter.main_grad for name, parameter in trained.items()}
        faults = list(_find_not_finite_tensors("gradient", chunk_number, gradients, make_model_namer(chunk)))
        # Gradients are searched from the last layer to the first, so their places are negative.
        yield from ((kind, Place(0, -place.chunk, -place.call), name) for kind, place, name in reversed(faults))


def _find_not_finite_tensors(
    kind: str, chunk: int, tensors: Mapping[str, Tensor], rename: Callable[[str], str]
) -> Iterator[tuple[str, Place, str]]:
    """Yield a chunk's tensors [*shape] that are not finite: kind, place and name in the model."""
    if not tensors:
        return
    not_finite_flags = torch.stack([_flag_not_finite(values) for values in tensors.values()]).tolist()
    for tensor_index, (name, is_not_finite) in enumerate(zip(tensors, not_finite_flags, strict=True)):
        if is_not_finite:
            yield kind, Place(0, chunk, tensor_index), rename(name)


def _find_faulty_arrays(per_token: Mapping[str, np.ndarray], mask: np.ndarray) -> list[str]:
    return [
        name for name, values in per_token.items() if name not in _MAY_BE_NAN and not np.isfinite(values[mask]).all()
    ]


def _find_first_finding(finding: tuple[str, Place, str] | None, device: torch.device) -> NotFinite:
    """Return the first of all ranks' findings, and the ranks with the same finding. A collective."""
    # An all-reduce of zeros and one rank's numbers is a gather.
    # Numbers of each rank: kind (0: nothing found), place, and the name's bytes.
    numbers_by_rank = torch.zeros((dist.get_world_size(), 4 + _NAME_BYTES), dtype=torch.int64)
    if finding is not None:
        kind, place, name = finding
        name_bytes = name.encode()[:_NAME_BYTES]
        numbers = [_KINDS.index(kind) + 1, *place, *name_bytes]
        numbers_by_rank[dist.get_rank(), : len(numbers)] = torch.tensor(numbers)
    numbers_by_rank = numbers_by_rank.to(device)
    dist.all_reduce(numbers_by_rank)
    findings = {rank: numbers for rank, numbers in enumerate(numbers_by_rank.tolist()) if numbers[0]}
    if not findings:
        return NotFinite("none", "", None, ())
    first_finding = min(findings.values(), key=lambda numbers: numbers[:4])
    name = bytes(byte for byte in first_finding[4:] if byte).decode(errors="replace")
    layer = re.search(r"\blayers\.(\d+)\b", name)
    ranks = tuple(rank for rank, numbers in findings.items() if numbers == first_finding)
    return NotFinite(_KINDS[first_finding[0] - 1], name, int(layer[1]) if layer else None, ranks)
