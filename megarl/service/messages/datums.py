"""A client's datums as a batch of sequences.

Position i of a datum's arrays belongs to its target i. A batch's sequence has one token more: entry i + 1 of its arrays
belongs to the prediction of token i + 1, with target i as the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.data.token_batch import TokenBatch, borders
from megarl.service.messages.losses import LOSSES
from megarl.service.messages.wire import Datum
from megarl.service.refusals import UserError

_ARRAYS = {"weights": "token_weights", "logprobs": "old_logprobs", "advantages": "advantages"}
"""Names of a client's arrays, with megarl's names."""


def make_batch(datums: Sequence[Datum], loss: str, *, vocab_size: int, max_tokens: int) -> TokenBatch:
    """Return a call's batch. Raises UserError with the first faulty datum and array.

    `max_tokens` is the size of the trainer's rows in tokens.
    """
    for number, datum in enumerate(datums):
        _check_datum(datum, f"data[{number}]", loss, vocab_size=vocab_size, max_tokens=max_tokens)
    sequences = [np.append(datum.token_ids, datum.inputs["target_tokens"][-1:]) for datum in datums]
    # Targets need not be the next input tokens: labels are separate from the sequence.
    labels = [_prepend_zero(datum.inputs["target_tokens"]) for datum in datums]
    # Nothing predicts a sequence's first token.
    masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
    if loss == "gspo":
        masks = [_prepend_zero(datum.inputs["sequence_ratio_mask"]) > 0 for datum in datums]
    return TokenBatch(
        token_ids=np.concatenate(sequences),
        loss_mask=np.concatenate(masks),
        cu_seqlens=borders([len(sequence) for sequence in sequences]),
        samples=np.arange(len(datums)),
        per_token={
            _ARRAYS[name]: np.concatenate([_prepend_zero(datum.inputs[name]).astype(np.float32) for datum in datums])
            for name in LOSSES[loss].inputs
            if name in _ARRAYS
        },
        labels=np.concatenate(labels),
    )


def split_values(values: NDArray[np.float32], batch: TokenBatch) -> list[NDArray[np.float32]]:
    """Return values [tokens of the batch] by datum, without each sequence's first token."""
    return [part[1:] for part in np.split(values, batch.cu_seqlens[1:-1])]


def _prepend_zero(values: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([np.zeros(1, values.dtype), values])


def _check_datum(datum: Datum, field_path: str, loss: str, *, vocab_size: int, max_tokens: int) -> None:
    """Raise UserError for a datum that the loss or the model cannot take. `field_path` begins messages: `data[3]`."""
    num_tokens = len(datum.token_ids)
    if not num_tokens:
        raise UserError(f"{field_path}.model_input is empty: give at least one token")
    # The trainer's sequence has one token more.
    if num_tokens + 1 > max_tokens:
        raise UserError(
            f"{field_path}.model_input has {num_tokens} tokens: this service trains at most {max_tokens - 1} at once "
            "(trainer.max_tokens_per_microbatch); cut the datum"
        )
    required_names = {"target_tokens", *LOSSES[loss].inputs}
    if missing_names := sorted(required_names - datum.inputs.keys()):
        raise UserError(f"{field_path}.loss_fn_inputs.{missing_names[0]} is missing: {loss} needs it")
    # Without this array, silently another loss than the client's would be trained.
    if unused_names := sorted(datum.inputs.keys() - required_names):
        raise UserError(f"{field_path}.loss_fn_inputs.{unused_names[0]:.50}: {loss} does not use it; leave it out")
    for name, values in datum.inputs.items():
        if len(values) != num_tokens:
            raise UserError(
                f"{field_path}.loss_fn_inputs.{name} has {len(values)} values, but model_input has {num_tokens} tokens"
            )
        if name != "target_tokens" and not np.isfinite(values).all():
            raise UserError(f"{field_path}.loss_fn_inputs.{name} has a value that is not finite")
    if datum.inputs["target_tokens"].dtype.kind != "i":
        raise UserError(f"{field_path}.loss_fn_inputs.target_tokens has fractions; send int64")
    for name, token_ids in (("model_input", datum.token_ids), ("target_tokens", datum.inputs["target_tokens"])):
        if token_ids.min() < 0 or token_ids.max() >= vocab_size:
            raise UserError(f"{field_path}.{name} has a token outside of the vocabulary: 0 to {vocab_size - 1}")
    if loss == "gspo":
        _check_ratio_mask(datum, field_path)


def _check_ratio_mask(datum: Datum, field_path: str) -> None:
    """Raise UserError unless gspo's mask is 0 or 1, marks a token, and covers all advantages."""
    mask = datum.inputs["sequence_ratio_mask"]
    if not np.isin(mask, (0, 1)).all():
        raise UserError(f"{field_path}.loss_fn_inputs.sequence_ratio_mask has other values than 0 and 1")
    if not mask.any():
        raise UserError(
            f"{field_path}.loss_fn_inputs.sequence_ratio_mask is 0 everywhere: mark the sampled tokens with 1"
        )
    if datum.inputs["advantages"][mask == 0].any():
        raise UserError(
            f"{field_path}.loss_fn_inputs.advantages: is not 0 at a token outside of sequence_ratio_mask; gspo trains "
            "the masked tokens only"
        )
