"""Replacement of a trained model's whole state between calls: weights, gradients, moments and step counts.

A service that trains several adapters with one model uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.training.training_engine import TrainingEngine


@dataclass(frozen=True, slots=True)
class TrainedState:
    """Copies in host memory of a model's trained state on this rank.

    `tensors`: trained weights, gradients and main weights. `moments`: the optimizer's values of each parameter.
    `steps`: step counts of its parameter groups. `reduction` sums the gradients over the ranks, if that is still to be
    done.
    """

    tensors: list[Tensor]
    moments: list[list[dict[str, Any]]]
    steps: list[list[Any]]
    reduction: Callable[[], None] | None


def copy_state(engine: TrainingEngine) -> TrainedState:
    """Copy the engine's trained state to host memory. The engine must be on its device."""
    inner_optimizers = _inner_optimizers(engine)
    return TrainedState(
        tensors=[_copy_to_host(tensor) for tensor in _live_tensors(engine)],
        moments=[
            [
                {name: _copy_to_host(value) for name, value in inner_optimizer.state.get(parameter, {}).items()}
                for parameter in _parameters(inner_optimizer)
            ]
            for inner_optimizer in inner_optimizers
        ],
        # Transformer Engine and apex count steps in the groups, torch in each parameter's state.
        steps=[[group.get("step") for group in inner_optimizer.param_groups] for inner_optimizer in inner_optimizers],
        reduction=engine.gradient_reduction.pending,
    )


def state_bytes(engine: TrainingEngine) -> int:
    """Return the bytes of a copied state after the optimizer's first step."""
    # Adam has two moments in float32.
    num_main_weights = sum(
        parameter.numel() for inner_optimizer in _inner_optimizers(engine) for parameter in _parameters(inner_optimizer)
    )
    return sum(tensor.nbytes for tensor in _live_tensors(engine)) + 8 * num_main_weights


@torch.no_grad()
def restore_state(engine: TrainingEngine, state: TrainedState) -> None:
    """Write a state from `copy_state` back into the engine, in place."""
    for tensor, values in zip(_live_tensors(engine), state.tensors, strict=True):
        tensor.copy_(values)
    for inner_optimizer, moments, steps in zip(_inner_optimizers(engine), state.moments, state.steps, strict=True):
        for parameter, values in zip(_parameters(inner_optimizer), moments, strict=True):
            # Copy the values: a step changes tensors of the state in place, which must not change the copies.
            inner_optimizer.state[parameter] = {name: _to_live(value, parameter) for name, value in values.items()}
            if not values:
                del inner_optimizer.state[parameter]
        for group, step in zip(inner_optimizer.param_groups, steps, strict=True):
            group.pop("step", None)
            if step is not None:
                group["step"] = step
    engine.gradient_reduction.pending = state.reduction


def write_state(state: TrainedState, file: Path) -> None:
    """Write a state to a file. Raises ValueError if its gradients are not yet reduced over the ranks."""
    if state.reduction is not None:
        raise ValueError("the state has gradients whose reduction is due; keep it in memory")
    torch.save({"tensors": state.tensors, "moments": state.moments, "steps": state.steps}, file)


def read_state(file: Path) -> TrainedState:
    values = torch.load(file, map_location="cpu", weights_only=True)
    return TrainedState(values["tensors"], values["moments"], values["steps"], None)


def drop_moments(engine: TrainingEngine) -> None:
    """Reset the optimizer: no moments and no steps. Main weights stay."""
    for inner_optimizer in _inner_optimizers(engine):
        inner_optimizer.state.clear()
        for group in inner_optimizer.param_groups:
            group.pop("step", None)


def trained_parameters(engine: TrainingEngine) -> list[Tensor]:
    """Return the trained parameters [*shape] on this rank, in a fixed order."""
    return [parameter for parameter in engine.parameters.values() if parameter.requires_grad]


def _live_tensors(engine: TrainingEngine) -> Iterator[Tensor]:
    """Yield trained weights, gradient buffers and the optimizer's main weights. Shared memory comes once."""
    addresses: set[int] = set()
    main_weights = [
        parameter for inner_optimizer in _inner_optimizers(engine) for parameter in _parameters(inner_optimizer)
    ]
    for tensor in (*trained_parameters(engine), *engine.gradient_buffers(), *main_weights):
        # With float32 weights the optimizer trains the parameters themselves, or views of their buffers.
        if tensor.numel() and tensor.data_ptr() not in addresses:
            addresses.add(tensor.data_ptr())
            yield tensor.detach()


def _inner_optimizers(engine: TrainingEngine) -> list[Any]:
    optimizers: list[Any] = engine.optimizer.chained_optimizers
    return [optimizer.optimizer for optimizer in optimizers]


def _parameters(inner_optimizer: Any) -> list[Tensor]:
    return [parameter for group in inner_optimizer.param_groups for parameter in group["params"]]


def _copy_to_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _to_live(value: Any, parameter: Tensor) -> Any:
    """Return a live copy of a stored value: scalars in host memory, tensors on the parameter's device."""
    if not isinstance(value, Tensor):
        return value
    return value.to(parameter.device if value.numel() > 1 else value.device, copy=True)
