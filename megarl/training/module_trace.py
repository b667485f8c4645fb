"""Records every output of a model's modules during forward passes. Each output is reduced to one number."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megarl.tracking.model_outputs import Output, Place

_LOCAL_LAYER = re.compile(r"(.*\blayers\.)(\d+)\b(.*)")


class ModuleTrace:
    """Recorder of the outputs of all modules of `chunks`, in order, within the context `recording`.

    `measure` reduces an output [*shape] to an integer scalar on its device.
    """

    def __init__(self, chunks: Sequence[nn.Module], measure: Callable[[Tensor], Tensor]) -> None:
        self._chunks, self._measure = chunks, measure
        self._chunk_numbers = list_chunk_numbers(len(chunks))
        self._rows = [-1] * len(chunks)
        self._running_chunk: int | None = None
        self._calls = 0
        self._places: list[Place] = []
        self._names: list[str] = []
        self._measures: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which the outputs of all modules are recorded, through hooks."""
        handles: list[Any] = []
        for index, chunk in enumerate(self._chunks):
            handles.append(chunk.register_forward_pre_hook(self._make_begin_hook(index)))
            to_model_name = make_model_namer(chunk)
            for name, module in chunk.named_modules():
                # The chunk itself has an empty name. Its output is the chunk's.
                output_name = to_model_name(name) or "output"
                handles.append(module.register_forward_hook(self._make_output_hook(output_name, module is chunk)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def outputs(self) -> list[Output]:
        """The host waits for the device."""
        numbers = torch.stack(self._measures).tolist() if self._measures else []
        return [Output(*values) for values in zip(self._places, self._names, numbers, strict=True)]

    def _make_begin_hook(self, index: int) -> Callable[..., None]:
        def begin_row(*_: object) -> None:
            self._rows[index] += 1
            self._running_chunk, self._calls = index, 0

        return begin_row

    def _make_output_hook(self, name: str, is_chunk: bool) -> Callable[..., None]:
        """Return the forward hook of the module `name`. With `is_chunk`, its output ends the chunk's pass."""

        def record_output(_module: object, _inputs: object, output: object) -> None:
            """Record place, name and measure of each tensor in a module's output."""
            # In the backward pass, recomputed activations call the hooks again. They are not outputs of the chunk.
            if self._running_chunk is None:
                return
            for tensor in _list_float_tensors(output):
                chunk = self._running_chunk
                self._places.append(Place(self._rows[chunk], self._chunk_numbers[chunk], self._calls))
                self._names.append(name)
                self._measures.append(self._measure(tensor.detach()))
                self._calls += 1
            if is_chunk:
                self._running_chunk = None

        return record_output


def list_chunk_numbers(num_chunks: int) -> list[int]:
    """Return the positions of this stage's chunks among all chunks of the model, from 0 in layer order."""
    # Imported late: the driver reads `CanaryReport` without Megatron.
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return [stage + index * stages for index in range(num_chunks)]


def make_model_namer(chunk: nn.Module) -> Callable[[str], str]:
    """Return a function from names in a chunk to names in the model. A chunk numbers its layers from 0."""
    modules: Mapping[str, nn.Module] = dict(chunk.named_modules())

    def to_model_name(name: str) -> str:
        """Replace the layer's number in the chunk by its number in the model, both from 0."""
        match = _LOCAL_LAYER.fullmatch(name)
        if match is None:
            return name
        prefix, chunk_number, suffix = match.groups()
        # Megatron's `layer_number` counts the model's layers from 1.
        layer_number = getattr(modules.get(prefix + chunk_number), "layer_number", None)
        return name if layer_number is None else f"{prefix}{layer_number - 1}{suffix}"

    return to_model_name


def _list_float_tensors(output: object) -> Iterator[Tensor]:
    tensors = output if isinstance(output, tuple | list) else (output,)
    yield from (
        tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel()
    )
