"""The two sides of a distillation by distributions: a teacher that hands out lessons, a policy that takes them.

A lesson is a row of bytes for each trained token: the teacher's hidden state before its head (full_vocabulary), or its
most likely tokens, their log-probs and that of all others (top_k). Bytes travel and wait more easily than several kinds
of tensors.
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
from megarl.models.divergence import (
    DivergenceFunction,
    vocab_parallel_divergence,
    vocab_parallel_gathered,
    vocab_parallel_top_k,
)
from megarl.models.policy import PolicyModel

_TOP_K_BYTES = 8
"""Of a token among the most likely ones: its id, int32, and its log-prob, float32."""
_OTHERS_BYTES = 4
"""Of all other tokens: their log-prob together, float32."""


def divergence_of(config: DistillationConfig) -> DivergenceFunction:
    """The divergence that a recipe names, with its keywords."""
    function = DIVERGENCES[config.divergence]
    return partial(function, **supported_kwargs(function, {"beta": config.jsd_beta}))


def lesson_bytes(config: DistillationConfig, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of a token's lesson by a teacher of this hidden size."""
    of_top_k = config.top_k * _TOP_K_BYTES + _OTHERS_BYTES
    return of_top_k if config.loss == "top_k" else hidden_size * dtype.itemsize


class TeacherModel(PolicyModel):
    """A teacher: its last stage returns lessons of the tokens that are asked for, uint8 [tokens, bytes of a lesson].

    `num_common_tokens` are those that the policy's vocabulary has too.
    """

    def __init__(self, *args: Any, distillation: DistillationConfig, num_common_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._distillation = distillation
        # Further rows of either vocabulary are padding, which no tokenizer makes.
        self.num_local_tokens = max(0, min(self.num_local_tokens, num_common_tokens - self.first_token_id))
        self._is_taught = torch.zeros(0, dtype=torch.bool)

    def teach(self, is_taught: Tensor) -> None:
        """The next forward pass gives lessons of the positions where `is_taught`, bool [tokens], is True."""
        self._is_taught = is_taught

    def _of_tokens(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Lessons of all positions in order; of those that nobody asked for, zeros."""
        taught = hidden[self._is_taught]
        if self._distillation.loss == "top_k":
            token_ids, *logprobs = vocab_parallel_top_k(
                taught,
                weight,
                self._distillation.top_k,
                first_token_id=self.first_token_id,
                group=self.pg_collection.tp,
                temperature=self._distillation.temperature,
                chunk_tokens=self.logprob_chunk_tokens,
            )
            parts = token_ids.int(), logprobs[0], logprobs[1][:, None]
            rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
        else:
            rows = taught.contiguous().view(torch.uint8)
        lessons = rows.new_zeros(len(hidden), rows.size(-1))
        lessons[self._is_taught] = rows
        return lessons


class Lesson(NamedTuple):
    """The lessons of one teacher at some of a row's positions on this rank.

    Shapes: places int64 [taught tokens], rows uint8 [taught tokens, bytes of a lesson].
    """

    places: Tensor
    rows: Tensor
    num_local_tokens: int
    """Rows of this rank's part of the policy's head whose tokens the teacher has too: the first so many."""
    head: Tensor | None
    """The teacher's head rows of these tokens, [local tokens, teacher's hidden_size] (full_vocabulary)."""


class StudentModel(PolicyModel):
    """A policy that learns from lessons: its last stage returns log-probs, entropies and divergences [3, tokens].

    Only the divergences, float32, in nats, carry gradient; they are zero where there is no lesson.
    """

    def __init__(self, *args: Any, distillation: DistillationConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._distillation = distillation
        self._divergence = divergence_of(distillation)
        self._lessons: Sequence[Lesson] = ()

    def learn_from(self, lessons: Sequence[Lesson]) -> None:
        """The next forward pass compares with these lessons, whose places are disjoint."""
        self._lessons = lessons

    def _of_tokens(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            logprobs, entropies = super()._of_tokens(hidden, weight, labels)
        divergences = torch.zeros_like(logprobs)
        # Those of the last row would stay on the device, a teacher's head among them, while the engine samples.
        lessons, self._lessons = self._lessons, ()
        for lesson in lessons:
            compare = self._of_top_k if lesson.head is None else self._of_whole
            divergences = divergences.index_add(0, lesson.places, compare(hidden[lesson.places], weight, lesson))
        return torch.stack([logprobs, entropies, divergences])

    def _of_whole(self, hidden: Tensor, weight: Tensor, lesson: Lesson) -> Tensor:
        assert lesson.head is not None
        return vocab_parallel_divergence(
            hidden,
            weight[: lesson.num_local_tokens],
            lesson.rows.view(lesson.head.dtype),
            lesson.head,
            self._divergence,
            group=self.pg_collection.tp,
            temperature=self._distillation.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )

    def _of_top_k(self, hidden: Tensor, weight: Tensor, lesson: Lesson) -> Tensor:
        token_ids, of_tokens = lesson.rows.tensor_split([self._distillation.top_k * torch.int32.itemsize], -1)
        teacher_logprobs = of_tokens.contiguous().view(torch.float32)
        policy_logprobs = vocab_parallel_gathered(
            hidden,
            weight[: lesson.num_local_tokens],
            token_ids.contiguous().view(torch.int32).long(),
            first_token_id=self.first_token_id,
            group=self.pg_collection.tp,
            temperature=self._distillation.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )
        complete = TAILS[self._distillation.tail]
        of_teacher = complete(teacher_logprobs[:, :-1], teacher_logprobs[:, -1])
        terms, _ = self._divergence(complete(*policy_logprobs), of_teacher)
        return terms.sum(-1)
