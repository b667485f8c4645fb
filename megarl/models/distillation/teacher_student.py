"""The models of distillation: a teacher that computes targets, and a policy that learns from them.

A target is a row of bytes for one trained token: one tensor is easier to send than several. full_vocabulary: the
teacher's hidden state before its head. top_k: the ids of the most likely tokens, their log-probs, and the joint
log-prob of the remaining tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.divergences import DIVERGENCES, TAILS
from megarl.algorithms.keywords import supported_kwargs
from megarl.config import DistillationConfig
from megarl.models.attention import PackedRow
from megarl.models.distillation.divergence import (
    DivergenceFunction,
    vocab_parallel_divergence,
    vocab_parallel_k_logprobs,
    vocab_parallel_top_k,
)
from megarl.models.policy import PolicyModel

_TOP_K_BYTES = 8
"""Bytes per likely token: its id, int32, and its log-prob, float32."""
_OTHERS_BYTES = 4
"""Bytes of the joint log-prob of the remaining tokens, float32."""


def bind_divergence(config: DistillationConfig) -> DivergenceFunction:
    function = DIVERGENCES[config.divergence]
    return partial(function, **supported_kwargs(function, {"beta": config.jsd_beta}))


def target_bytes(config: DistillationConfig, hidden_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's target. `hidden_size` and `dtype` are the teacher's."""
    top_k_bytes = config.top_k * _TOP_K_BYTES + _OTHERS_BYTES
    return top_k_bytes if config.loss == "top_k" else hidden_size * dtype.itemsize


def count_not_finite(targets: Tensor, config: DistillationConfig, dtype: torch.dtype) -> int:
    """Return the number of targets, uint8 [tokens, bytes], that no policy can learn. `dtype` is the teacher's.

    A hidden state must be finite. A log-prob may be -inf: the teacher cannot produce these tokens.
    """
    # Minimum and maximum are NaN if an element is NaN. Unlike `isfinite` of all elements, they need no further memory.
    if config.loss != "top_k":
        extremes = torch.stack(targets.contiguous().view(dtype).aminmax(dim=-1))
        return int((~extremes.isfinite()).any(0).sum())
    logprobs = targets[:, config.top_k * torch.int32.itemsize :].contiguous().view(torch.float32)
    return int((~(logprobs.amax(-1) < torch.inf)).sum())


class TargetModel(PolicyModel):
    """A policy or teacher that can compute a student's targets (its distribution or hidden state at each token).

    After `request_targets`, the last pipeline stage returns targets instead of log-probs: uint8 [tokens, bytes].
    """

    def __init__(self, *args: Any, distillation: DistillationConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._distillation = distillation
        self._is_requested: Tensor | None = None

    def request_targets(self, is_requested: Tensor) -> None:
        """Request targets from the next forward pass, at the positions where `is_requested`, bool [tokens], is True."""
        self._is_requested = is_requested

    def _token_outputs(self, hidden: Tensor, weight: Tensor, labels: Tensor, row: PackedRow) -> Tensor:
        """Return the targets of all positions in order, zeros where none is requested.

        Without any request, return a policy's outputs.
        """
        # A request is valid for one pass only: the next may be an update of this model.
        is_requested, self._is_requested = self._is_requested, None
        if is_requested is None:
            return super()._token_outputs(hidden, weight, labels, row)
        trained_hidden = row.states_at(hidden, is_requested)
        if self._distillation.loss == "top_k":
            token_ids, *logprobs = vocab_parallel_top_k(
                trained_hidden,
                weight,
                self._distillation.top_k,
                first_token_id=self.first_token_id,
                group=self.pg_collection.tp,
                temperature=self._distillation.temperature,
                chunk_tokens=self.logprob_chunk_tokens,
            )
            target_parts = token_ids.int(), logprobs[0], logprobs[1][:, None]
            target_bytes = torch.cat([part.contiguous().view(torch.uint8) for part in target_parts], -1)
        else:
            target_bytes = trained_hidden.contiguous().view(torch.uint8)
        all_targets = target_bytes.new_zeros(len(is_requested), target_bytes.size(-1))
        all_targets[is_requested] = target_bytes
        return all_targets


class TeacherModel(TargetModel):
    """A teacher with its own weights. `num_common_tokens`: tokens in both vocabularies."""

    def __init__(self, *args: Any, num_common_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Further rows of either vocabulary are padding, which no tokenizer produces.
        self.num_local_tokens = max(0, min(self.num_local_tokens, num_common_tokens - self.first_token_id))


class TeacherTargets(NamedTuple):
    """Distillation targets of one teacher, for some of a row's positions on this rank.

    Shapes: indices int64 [target tokens] among the rank's tokens, contents uint8 [target tokens, bytes of a target].
    """

    indices: Tensor
    contents: Tensor
    num_local_tokens: int
    """The teacher's tokens in this rank's part of the policy's vocabulary. They come first in the part."""
    head: Tensor | None
    """The teacher's head rows of these tokens, [local tokens, teacher's hidden_size]; None with top_k."""


class StudentModel(TargetModel):
    """A policy that learns from targets. Its last stage returns log-probs, entropies and divergences [3, tokens].

    Only the divergences, float32, in nats, carry gradient. They are zero at positions without a target.
    """

    def __init__(self, *args: Any, distillation: DistillationConfig, **kwargs: Any) -> None:
        super().__init__(*args, distillation=distillation, **kwargs)
        self._divergence = bind_divergence(distillation)
        self._targets: Sequence[TeacherTargets] = ()

    def set_targets(self, all_targets: Sequence[TeacherTargets]) -> None:
        """Set the targets of the next forward pass, by teacher. No position may have two teachers."""
        self._targets = all_targets

    def _token_outputs(self, hidden: Tensor, weight: Tensor, labels: Tensor, row: PackedRow) -> Tensor:
        """Return log-probs, entropies and divergences from the teachers, [3, tokens].

        If targets are requested, return these.
        """
        if self._is_requested is not None:
            return super()._token_outputs(hidden, weight, labels, row)
        with torch.no_grad():
            logprobs, entropies = super()._token_outputs(hidden, weight, labels, row)
        divergences = torch.zeros_like(logprobs)
        # Drop the references: otherwise the last row's targets and teacher's head stay on the device during sampling.
        all_targets, self._targets = self._targets, ()
        for targets in all_targets:
            compare = self._top_k_divergence if targets.head is None else self._full_vocabulary_divergence
            states = row.states_at(hidden, targets.indices)
            divergences = divergences.index_add(0, targets.indices, compare(states, weight, targets))
        return torch.stack([logprobs, entropies, divergences])

    def _full_vocabulary_divergence(self, hidden: Tensor, weight: Tensor, targets: TeacherTargets) -> Tensor:
        """Return divergences [target tokens] over the whole vocabulary. The targets are the teacher's hidden states."""
        assert targets.head is not None
        return vocab_parallel_divergence(
            hidden,
            weight[: targets.num_local_tokens],
            targets.contents.view(targets.head.dtype),
            targets.head,
            self._divergence,
            group=self.pg_collection.tp,
            temperature=self._distillation.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )

    def _top_k_divergence(self, hidden: Tensor, weight: Tensor, targets: TeacherTargets) -> Tensor:
        """Return divergences [target tokens]. All tokens outside the teacher's top k count as one token."""
        token_ids, logprob_bytes = targets.contents.tensor_split([self._distillation.top_k * torch.int32.itemsize], -1)
        teacher_logprobs = logprob_bytes.contiguous().view(torch.float32)
        policy_logprobs = vocab_parallel_k_logprobs(
            hidden,
            weight[: targets.num_local_tokens],
            token_ids.contiguous().view(torch.int32).long(),
            first_token_id=self.first_token_id,
            group=self.pg_collection.tp,
            temperature=self._distillation.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )
        add_tail = TAILS[self._distillation.tail]
        teacher_distribution = add_tail(teacher_logprobs[:, :-1], teacher_logprobs[:, -1])
        terms, _ = self._divergence(add_tail(*policy_logprobs), teacher_distribution)
        return terms.sum(-1)
