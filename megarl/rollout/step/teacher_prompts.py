"""The teacher's own prompts: more context than in the policy's prompt, followed by the same sampled tokens.

This is self-distillation with privileged context (OPSD, arXiv 2601.18734; SDFT, 2601.19897; SDPO, 2601.20802). Token
ids are joined. Sampled tokens are never tokenised again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config.teacher_templates import RECORD, fill_template
from megarl.data.dialogue import Dialogue
from megarl.data.token_batch import TokenBatch, borders, select_retained
from megarl.types import MegarlError, Trajectory


class Opening(NamedTuple):
    """A teacher's beginning of a sequence: `token_ids` [tokens] replace the policy's first `num_replaced` tokens."""

    num_replaced: int
    token_ids: NDArray[np.int64]

    def length_of(self, num_tokens: int) -> int:
        """Return the length of a sequence with this opening. `num_tokens` is its length with the policy's prompt."""
        return num_tokens - self.num_replaced + len(self.token_ids)


@dataclass(slots=True)
class TeacherPrompts:
    """Writes the teacher's prompts for one source of problems.

    `template` and `context` are the fields `distillation.teacher_prompt` and `distillation.context`.
    """

    template: str
    context: tuple[str, ...]
    dialogue: Dialogue
    _last_valid_prompt: tuple[bytes, str] | None = None
    """The last prompt that passed `_check_prompt`, with messages and tools. A group's attempts usually share them."""

    def make_openings(self, trajectory: Trajectory, group: Sequence[Trajectory]) -> list[Opening | None] | None:
        """Return the teacher's opening of each segment; None for a segment without sampled tokens.

        `group` are the attempts at the same problem. Returns None if the trajectory has no context. Raises MegarlError
        if the chat template did not write the prompt: then the teacher's prompt cannot be derived.
        """
        context_texts = [text for part in self.context if (text := _find_context_text(part, trajectory, group))]
        if self.context and not context_texts:
            return None
        prompt, messages = trajectory.first_prompt, trajectory.messages[0] if trajectory.messages else ()
        if prompt is None:
            return [None for _ in trajectory.segments]
        # Render for each attempt: attempts of a group may have different contexts.
        teacher_prompt = self._render(_fill_template(self.template, messages, "\n\n".join(context_texts)), trajectory)
        self._check_prompt(prompt, messages, trajectory)
        openings: list[Opening | None] = []
        for segment in trajectory.segments:
            if not segment.loss_mask.any():
                openings.append(None)
                continue
            # Sampled tokens are never replaced, even if the prompts agree with them.
            first_sampled = int(segment.loss_mask.argmax())
            opening = replace_opening(segment.token_ids[:first_sampled], prompt=prompt, teacher_prompt=teacher_prompt)
            if opening is None:
                raise _make_prompt_error(trajectory, "a later model call does not begin with the first prompt")
            openings.append(opening)
        return openings

    def _render(self, messages: Sequence[Mapping[str, Any]], trajectory: Trajectory) -> NDArray[np.int64]:
        try:
            return self.dialogue.opening(messages, trajectory.tools).astype(np.int64)
        except ValueError as error:
            raise _make_prompt_error(trajectory, str(error)) from error

    def _check_prompt(
        self, prompt: NDArray[np.int64], messages: Sequence[Mapping[str, Any]], trajectory: Trajectory
    ) -> None:
        """Raise MegarlError unless the chat template turns the messages into exactly this prompt."""
        if (key := (prompt.tobytes(), f"{messages}{trajectory.tools}")) == self._last_valid_prompt:
            return
        if not np.array_equal(self._render(messages, trajectory), prompt):
            raise _make_prompt_error(trajectory, "its prompt is not its messages in the chat template")
        self._last_valid_prompt = key


def replace_opening(
    token_ids: NDArray[np.int64], *, prompt: NDArray[np.int64], teacher_prompt: NDArray[np.int64]
) -> Opening | None:
    """Return the teacher's opening of a sequence. `token_ids` [tokens] are its tokens before the first sampled token.

    A later segment may lack the end of `prompt` [tokens], for example the start of the reasoning. Then both prompts
    must end with the missing tokens. Returns None if the sequence differs from the prompt earlier.
    """
    num_equal = _count_common_tokens(token_ids, prompt)
    # The sequence lacks these last tokens of the prompt.
    num_missing = len(prompt) - num_equal
    if num_missing > _count_common_tokens(prompt[::-1], teacher_prompt[::-1]):
        return None
    return Opening(num_equal, teacher_prompt[: len(teacher_prompt) - num_missing])


def join_openings(batch: TokenBatch, openings: Sequence[Opening]) -> tuple[TokenBatch, NDArray[np.int64]]:
    """Return a batch as the teacher reads it, with each of its tokens' index in `batch`: int64 [teacher's tokens].

    `openings` has one opening per sequence. The opening's tokens have index -1.
    """
    token_pieces: list[NDArray[np.int64]] = []
    index_pieces: list[NDArray[np.int64]] = []
    for opening, first_token, end_token in zip(openings, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        first_retained = int(first_token) + opening.num_replaced
        token_pieces += [opening.token_ids, batch.token_ids[first_retained:end_token]]
        index_pieces.append(
            np.concatenate([np.full(len(opening.token_ids), -1, np.int64), np.arange(first_retained, end_token)])
        )
    batch_indices = np.concatenate(index_pieces)
    joined = TokenBatch(
        token_ids=np.concatenate(token_pieces),
        # Index -1 reads the batch's last token, so the first condition masks it.
        loss_mask=(batch_indices >= 0) & batch.loss_mask[batch_indices],
        cu_seqlens=borders([len(sequence_indices) for sequence_indices in index_pieces]),
        samples=batch.samples,
        # The engine routed the policy's prompt. The teacher's prompt differs, so the teacher's routers choose experts.
        retained_sets=None if batch.retained_sets is None else select_retained(batch.retained_sets, batch_indices),
        temperatures=batch.temperatures,
        target_keys=batch.target_keys,
    )
    return joined, batch_indices


def _count_common_tokens(first_tokens: NDArray[np.int64], second_tokens: NDArray[np.int64]) -> int:
    min_length = min(len(first_tokens), len(second_tokens))
    differs = np.flatnonzero(first_tokens[:min_length] != second_tokens[:min_length])
    return int(differs[0]) if len(differs) else min_length


def _find_context_text(part: str, trajectory: Trajectory, group: Sequence[Trajectory]) -> str:
    """Return the text of one part of `distillation.context`; empty if the trajectory has none."""
    if part == "feedback":
        # `messages` has a list before each completion. A further list has the messages after the last completion.
        final_lists = trajectory.messages[len(trajectory.texts) :] if trajectory.texts else ()
        return "\n\n".join(_text(message.get("content")) for messages in final_lists for message in messages).strip()
    if part == "success":
        return next((peer.text for peer in group if peer is not trajectory and _is_success(peer)), "").strip()
    return _text(trajectory.problem.record.get(part.removeprefix(RECORD))).strip()


def _is_success(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.reward.answer_correct is True


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _fill_template(template: str, messages: Sequence[Mapping[str, Any]], context: str) -> list[Mapping[str, Any]]:
    """Return the messages with the last user message filled into the template."""
    last_user_index = max(
        (index for index, message in enumerate(messages) if message.get("role") == "user"), default=None
    )
    if last_user_index is None or not isinstance(messages[last_user_index].get("content"), str):
        raise MegarlError(
            "distillation.teacher_prompt: a prompt has no user message, or its last user message is not plain text; "
            "remove such records, or leave out distillation.teacher_prompt"
        )
    prompt = messages[last_user_index]["content"]
    rewritten = {
        **messages[last_user_index],
        "content": fill_template(template, {"prompt": prompt, "context": context}),
    }
    return [*messages[:last_user_index], rewritten, *messages[last_user_index + 1 :]]


def _make_prompt_error(trajectory: Trajectory, reason: str) -> MegarlError:
    return MegarlError(
        f"distillation.teacher_prompt: the teacher's prompt cannot be built for problem {trajectory.problem.index} of "
        f"environment {trajectory.environment}: {reason}; use an environment for which megarl builds the prompts, or "
        "leave the field out"
    )
