"""Checks of a user's own policy loss or advantage function: the type of its result, and a trial call with toy
tensors.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.keywords import supported_kwargs
from megarl.algorithms.policy_losses import LossAndMetrics, is_sequence_loss

POLICY_LOSS_RESULT = (
    "return (loss, metrics): loss a float tensor [tokens], one value for each of policy_logprobs; metrics a dict of "
    "name to float tensor [tokens], or {}"
)
ADVANTAGE_RESULT = "return a float tensor [samples], one advantage for each of rewards"

TRAINING_METRICS = frozenset(
    {
        "empty_update", "entropy", "gap_exceeded", "grad_norm", "learning_rate", "loss", "moe_aux_loss",
        "moe_global_aux_loss", "moe_seq_aux_loss", "moe_z_loss", "not_finite", "ptx_loss", "rollbacks", "spikes",
        "tokens", "update_skipped",
    }
)  # fmt: skip
"""Names of metrics `train/NAME` of every policy loss. A user's loss must not replace them."""
_LENGTHS = (4, 2, 3)
"""Lengths of the toy sequences in tokens. The first token of each is not trained."""
_NUM_GROUPS = 2
"""Toy groups: one with different rewards, one with equal rewards (standard deviation zero)."""


class ResultError(Exception):
    """Raised for an unusable result of a user's function. The message names the result and the expected type."""


def checked_policy_loss(result: object, policy_logprobs: Tensor) -> LossAndMetrics:
    """Return the checked result of a policy loss: (loss [tokens], metrics by name, each [tokens]).

    `policy_logprobs` is float [tokens]. Raises ResultError for a result of another type or shape.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise ResultError(f"the function returned {_describe_value(result)}; {POLICY_LOSS_RESULT}")
    loss, metrics = result
    shape = tuple(policy_logprobs.shape)
    if fault := _find_shape_fault(loss, shape):
        raise ResultError(f"the function returned {fault} as loss, for {shape[0]} tokens; {POLICY_LOSS_RESULT}")
    for name, value in metrics.items():
        if name in TRAINING_METRICS:
            raise ResultError(
                f"the function returned a metric {name!r}, but train/{name} is measured by the trainer; give the "
                f"function's another name, for example 'own_{name}'"
            )
        if fault := _find_shape_fault(value, shape):
            raise ResultError(
                f"the function returned {fault} as metric {name!r}, for {shape[0]} tokens; {POLICY_LOSS_RESULT}"
            )
    return loss, dict(metrics)


def refuse_missing_metrics(metrics: Mapping[str, Tensor], needed_metrics: Mapping[str, str]) -> None:
    """Raise ResultError if a policy loss lacks a metric. `needed_metrics` maps a required metric's name to its reader.

    `metrics` are float [tokens]. Each update calls this too: a function may return a metric only sometimes.
    """
    for name, reader in needed_metrics.items():
        if name not in metrics:
            raise ResultError(
                f"the function returned no metric {name!r}, which {reader} reads; return it, or leave {reader} out"
            )


def checked_advantages(result: object, rewards: Tensor) -> Tensor:
    """Return the checked result of an advantage estimator, [samples], in the dtype of `rewards`.

    `rewards` is float [samples]. Raises ResultError for a result of another type or shape.
    """
    if fault := _find_shape_fault(result, tuple(rewards.shape)):
        raise ResultError(f"the function returned {fault}, for {len(rewards)} samples; {ADVANTAGE_RESULT}")
    assert isinstance(result, Tensor)
    return result.to(rewards.dtype)


def policy_loss_fault(
    policy_loss: Callable[..., Any], settings: Mapping[str, Any], needed_metrics: Mapping[str, str]
) -> str | None:
    """Call a policy loss with `settings` as keywords on toy sequences, and return a description of the fault, or None.

    A fault is: the loss raises, has a wrong type or shape, lacks a metric of `needed_metrics` (reader by name), has no
    gradient, or is not finite on trained tokens.
    """
    try:
        _try_policy_loss(policy_loss, settings, needed_metrics)
    except ResultError as error:
        return str(error)
    return None


def advantage_fault(
    advantage: Callable[..., Any], settings: Mapping[str, Any], *, samples_per_group: int
) -> str | None:
    """Call an advantage estimator with `settings` on two toy groups, and return a description of the fault, or None.

    If it accepts them, it also gets `lengths` int64 [samples] and `passes` bool [samples], as in a run. A fault is: the
    estimator raises, returns a wrong type or shape, or is not finite.
    """
    try:
        _try_advantage(advantage, settings, samples_per_group)
    except ResultError as error:
        return str(error)
    return None


def _try_policy_loss(
    policy_loss: Callable[..., Any], settings: Mapping[str, Any], needed_metrics: Mapping[str, str]
) -> None:
    """Call a policy loss with toy sequences. Raises ResultError if its result or gradient is unusable."""
    # Toy sequences: the first token of each, as in a run, is not trained.
    cu_seqlens = torch.tensor([0, *_LENGTHS]).cumsum(0)
    mask = torch.ones(sum(_LENGTHS), dtype=torch.bool)
    mask[cu_seqlens[:-1]] = False
    leaf = -torch.linspace(0.1, 2.5, len(mask))
    leaf.requires_grad_()
    # In a run, the log-probs are one row of the model's output. Writing into them in place fails there, so it must fail
    # here.
    policy_logprobs, _ = torch.stack([leaf, leaf])
    # Half of the tokens have the ratio 1, like all tokens in a step's first update.
    old_logprobs = leaf.detach() + 0.3 * (torch.arange(len(mask)) % 2)
    advantages = torch.linspace(-1.0, 1.0, len(mask))
    sequence_arguments = (cu_seqlens, mask) if is_sequence_loss(policy_loss) else ()
    result = _call_with_toy_tensors(
        policy_loss, (policy_logprobs, old_logprobs, advantages, *sequence_arguments), settings
    )
    loss, metrics = checked_policy_loss(result, policy_logprobs)
    refuse_missing_metrics(metrics, needed_metrics)
    for name, values in {"loss": loss, **metrics}.items():
        if not values[mask].isfinite().all():
            raise ResultError(f"the function returned values that are not finite as {name}: {values.detach().tolist()}")
    # The gradient must exist and be finite.
    slopes = None
    if loss.requires_grad:
        [slopes] = torch.autograd.grad(loss[mask].sum(), leaf, allow_unused=True)
    if slopes is None:
        raise ResultError(
            "the function returned a loss without gradient; compute it from policy_logprobs without detach or no_grad"
        )
    if not slopes.isfinite().all():
        raise ResultError(f"the function returned a loss whose gradient is not finite: {slopes.tolist()}")


def _try_advantage(advantage: Callable[..., Any], settings: Mapping[str, Any], samples_per_group: int) -> None:
    num_samples = _NUM_GROUPS * samples_per_group
    sample_index = torch.arange(num_samples)
    groups = sample_index // samples_per_group
    # A run passes float64: a function with float32 buffers of its own must fail here.
    rewards = torch.where(groups == 0, (sample_index % 2).double(), 1.0)
    optional_arguments = supported_kwargs(advantage, {"lengths": 5 + sample_index, "passes": rewards > 0})
    result = _call_with_toy_tensors(advantage, (rewards, groups), {**optional_arguments, **settings})
    advantages = checked_advantages(result, rewards)
    if not advantages.isfinite().all():
        raise ResultError(
            f"the function returned {advantages.tolist()} for the rewards {rewards.tolist()} of groups "
            f"{groups.tolist()}; all must be finite, also where the rewards of a group are equal"
        )


def _call_with_toy_tensors(
    function: Callable[..., Any], arguments: tuple[Tensor, ...], settings: Mapping[str, Any]
) -> object:
    """Call a user's function. Raises ResultError with the line that failed and the tensors' shapes."""
    try:
        return function(*arguments, **settings)
    except Exception as error:  # The recipe's author wrote the function: it may raise anything.
        # The first frame is this function's. The second frame, if any, is the user's function.
        frames = traceback.extract_tb(error.__traceback__)[1:2]
        origin = f" ({frames[0].filename}, line {frames[0].lineno})" if frames else ""
        names = [*signature(function).parameters][: len(arguments)]
        shapes = ", ".join(f"{name} {_describe_value(tensor)}" for name, tensor in zip(names, arguments, strict=False))
        raise ResultError(
            f"the function raised {type(error).__name__}: {error}{origin} when it was called with toy tensors: {shapes}"
        ) from error


def _find_shape_fault(value: object, shape: tuple[int, ...]) -> str | None:
    is_fit = isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape) == shape
    return None if is_fit else _describe_value(value)


def _describe_value(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(map(_describe_value, value))})"
    return f"{value!r:.100}" if value is None else f"{type(value).__name__} {value!r:.100}"
