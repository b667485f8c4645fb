"""Preference pairs (a chosen and a rejected answer), and single answers labelled good or bad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megarl.data.kinds.base import TokenisedKind
from megarl.data.kinds.conversations import (
    Conversation,
    check_is_trained,
    encode_conversation,
    make_conversation,
    new_messages,
    refuse_empty_answers,
)
from megarl.data.messages import have_same_texts
from megarl.data.records import Record, TooLongError
from megarl.data.token_batch import TokenBatch, borders
from megarl.files.strict_json import shown
from megarl.types import TrainingSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Answers = tuple[TrainingSequence, ...]
"""One example: the chosen and the rejected conversation, or one conversation with its label `desirable`."""


Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(TokenisedKind):
    """Preference pairs as tokens, with both answers marked for training.

    A record has `chosen` and `rejected`, each a text or messages. The common prompt is in `messages`, `prompt` or
    `context`, unless both answers begin with it (`data.formats` lists other names). Two equal answers, and a pair
    longer than `max_tokens` in total, are errors.
    """

    is_scored: bool = False
    """Whether only the score at the end of each sequence is trained (`with_score_mask`)."""

    def make(self, index: int, record: Record) -> Answers:
        pair = _encode_pair(record, self.tokenizer, system_prompt=self.system_prompt, max_tokens=self.max_tokens)
        if not self.is_scored:
            return pair
        if not all(sequence.loss_mask[-1] for sequence in pair):
            raise record.error("an answer ends with weight 0, but the score is computed at its end; remove the weight")
        return tuple(map(with_score_mask, pair))

    def parts(self, record: Record) -> list[Any]:
        return list(map(list, read_pair(record, self.system_prompt)))

    def prompt(self, record: Record) -> Messages:
        return read_pair(record, self.system_prompt)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(TokenisedKind):
    """Data kind of single answers labelled good or bad. Its examples are tokenised conversations.

    The loss mask selects the answer's tokens.

    A record has `response` (or `completion`), a text or messages. Its prompt is in `messages`, `prompt` or `context`.
    `label` is true for a good answer. `data.formats` lists other names. A conversation longer than `max_tokens` is an
    error.
    """

    is_judged: ClassVar[bool] = True

    def make(self, index: int, record: Record) -> Answers:
        """Return the conversation as one sequence. Its last message is trained, and marked `desirable` if good."""
        messages, label = _read_judged_conversation(record, self.system_prompt)
        answer_index = len(messages) - 1
        conversation = make_conversation(
            record, self.tokenizer, messages, max_tokens=self.max_tokens, first_trained=answer_index
        )
        sequence = _only_sequence(record, conversation)
        desirable = (sequence.loss_mask & label).astype(np.float32)
        return (replace(sequence, desirable=desirable),)

    def parts(self, record: Record) -> list[Any]:
        messages, _ = _read_judged_conversation(record, self.system_prompt)
        check_is_trained(record, messages, first_trained=len(messages) - 1)
        return list(messages)


def read_pair(record: Record, system_prompt: str | None) -> tuple[Messages, Messages]:
    """Return the chosen and the rejected conversation of a record. Raises DataError."""
    record.require("chosen", "rejected", optional_roles=("prompt",))
    format = record.format
    if record.fields.get("margin"):
        raise record.error(
            f"'margin' is {shown(record.fields['margin'])}, which no loss reads; remove the field, or set it to 0"
        )
    chosen, rejected = (
        _read_conversation(record, record.field(names), system_prompt) for names in (format.chosen, format.rejected)
    )
    record.refuse_other_prompts((*chosen, *rejected), with_answers=True)
    # Without a prompt field, the comparison of the prompts (below) includes the system messages.
    if _find_prompt_field(record) and not have_same_texts(
        _select_system_messages(chosen), _select_system_messages(rejected)
    ):
        raise record.error("'chosen' and 'rejected' have different system messages; give both the same one")
    record.refuse_reasoning_field((*chosen, *rejected))
    # A rejected answer may be rejected for its call.
    record.refuse_unlisted_calls(chosen)
    if chosen == rejected:
        raise record.error("'chosen' and 'rejected' are the same; remove the line")
    num_shared = _count_shared(chosen, rejected)
    _refuse_different_prompts(record, chosen, rejected, num_shared)
    # A rejected answer may be rejected because it is empty.
    refuse_empty_answers(record, chosen, first_trained=num_shared)
    return chosen, rejected


def _count_shared(chosen: Messages, rejected: Messages) -> int:
    """Return how many messages both conversations begin with. These are context, so they are not trained in either."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next(
        (index for index, (chosen_message, rejected_message) in pairs if chosen_message != rejected_message),
        min(len(chosen), len(rejected)),
    )


def _refuse_different_prompts(record: Record, chosen: Messages, rejected: Messages, num_shared: int) -> None:
    """Raise DataError if two conversations differ before an answer, or do not end with one.

    Results of equal tool calls may differ: they come from the environment.
    """
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[-1]["role"] != "assistant":
            raise record.error(f"'{name}' ends with the role {messages[-1]['role']}; end with the assistant's answer")
    first_difference = next(zip(chosen[num_shared:], rejected[num_shared:], strict=False), ())
    if any(message["role"] not in ("assistant", "tool") for message in first_difference):
        texts = " and ".join(shown(message.get("content")) for message in first_difference)
        raise record.error(f"'chosen' and 'rejected' answer different prompts, {texts}; give both the same prompt")


def _encode_pair(record: Record, tokenizer: Tokenizer, *, system_prompt: str | None, max_tokens: int) -> Answers:
    """Return a record's pair as tokens. Raises DataError, and TooLongError for a pair longer than `max_tokens`."""
    chosen, rejected = read_pair(record, system_prompt)
    num_shared = _count_shared(chosen, rejected)
    pair = [
        _only_sequence(
            record, encode_conversation(record, tokenizer, messages, max_tokens=max_tokens, first_trained=num_shared)
        )
        for messages in (chosen, rejected)
    ]
    if (size := sum(map(len, pair))) > max_tokens:
        raise record.error(
            f"the pair has {size} tokens, trainer.max_tokens_per_microbatch allows {max_tokens}; "
            "raise it, remove the line, or set data.overlong=drop",
            TooLongError,
        )
    return pair[0], pair[1]


def _read_judged_conversation(record: Record, system_prompt: str | None) -> tuple[Messages, bool]:
    """Return the conversation of a labelled answer, and its label. Raises DataError."""
    record.require("response", "label", optional_roles=("prompt",))
    label = record.value(record.format.label)
    if not isinstance(label, bool):
        name = record.field(record.format.label)
        raise record.error(f"'{name}' is {label!r}; give true for a good answer, false for a bad one")
    field = record.field(record.format.response)
    record.refuse_other_responses(field)
    messages = _read_conversation(record, field, system_prompt)
    record.refuse_other_prompts(messages, with_answers=True)
    record.refuse_reasoning_field(messages)
    # A bad answer may be bad for its call.
    record.refuse_unlisted_calls(messages if label else messages[:-1])
    if label:
        refuse_empty_answers(record, messages, first_trained=len(messages) - 1)
    return messages, label


def _only_sequence(record: Record, conversation: Conversation) -> TrainingSequence:
    """Return an answer's sequence. Raises DataError for several sequences, because a loss compares whole answers."""
    sequence, *further_sequences = conversation
    if further_sequences:
        raise record.error(
            "the chat template rewrites earlier turns of an answer, so its turns do not fit into one sequence; give "
            "each assistant turn a record of its own, or use a template that only appends"
        )
    return sequence


def with_score_mask(sequence: TrainingSequence) -> TrainingSequence:
    """Return the sequence up to its answer's end, plus one position for the sequence's score."""
    answer_indices = sequence.loss_mask.nonzero()[0]
    length = int(answer_indices[-1]) + 1 if len(answer_indices) else len(sequence)
    # Entry t is predicted from the tokens before t, so any token can stand at the end.
    tokens = np.append(sequence.token_ids[:length], sequence.token_ids[0])
    return TrainingSequence(tokens, np.arange(length + 1) == length)


def with_score_masks(batch: TokenBatch) -> TokenBatch:
    """Return the batch with each sequence changed like `with_score_mask`."""
    new_lengths = batch.lengths + 1
    cu_seqlens = borders(new_lengths)
    is_old_token = np.ones(cu_seqlens[-1], np.bool_)
    is_old_token[cu_seqlens[1:] - 1] = False
    token_ids = np.empty(len(is_old_token), np.int64)
    token_ids[is_old_token] = batch.token_ids
    # Entry t is predicted from the tokens before t, so any token can stand at the end.
    token_ids[~is_old_token] = batch.token_ids[batch.cu_seqlens[:-1]]
    return TokenBatch(token_ids, ~is_old_token, cu_seqlens, batch.samples)


def _read_conversation(record: Record, field: str, system_prompt: str | None) -> tuple[Mapping[str, Any], ...]:
    """Return the whole conversation ending with the answer in `field`.

    The field has the whole conversation, or only the answer, or a repetition of the prompt and the answer.
    """
    prompt_field = _find_prompt_field(record)
    answer = record.messages(field, role="assistant")
    if not prompt_field:
        prompt_messages, answer = (), record.with_opening(answer, system_prompt)
    else:
        system_messages, answer = (answer[:1], answer[1:]) if answer[0]["role"] == "system" else ((), answer)
        prompt = record.messages(prompt_field, role="user")
        prompt_messages = record.with_opening((*system_messages, *prompt), system_prompt)
    if not any(message["role"] in ("user", "tool") for message in (*prompt_messages, *answer)):
        # The error for a record without any prompt field names the fields to add.
        record.require("prompt")
        raise record.error(f"'{field}' has no prompt; give it in 'messages', 'prompt' or 'context'")
    if not prompt_messages:
        return tuple(answer)
    if answer and answer[0]["role"] == "assistant":
        return (*prompt_messages, *new_messages(record, prompt_messages, answer, field))
    # Compare without the system message: an answer that repeats the prompt may lack it, or the recipe may have added it
    # to the prompt.
    question = prompt_messages[1:] if prompt_messages[0]["role"] == "system" else prompt_messages
    if have_same_texts(answer[: len(question)], question):
        return (*prompt_messages, *answer[len(question) :])
    raise record.error(f"'{field}' neither continues '{prompt_field}' nor begins with it; give the answer alone")


def _select_system_messages(messages: Messages) -> Messages:
    return tuple(message for message in messages if message["role"] == "system")


def _find_prompt_field(record: Record) -> str | None:
    """Return the field with the prompt, or None.

    Messages that repeat an answer's conversation are not the prompt: `ultrafeedback_binarized` has the chosen
    conversation in `messages` too. A text is the prompt even if an answer repeats it.
    """
    format = record.format
    answers = [record.value(names) for names in (format.chosen, format.rejected, format.response)]
    fields = [name for name in format.prompt if record.at(name) is not None]
    return next((name for name in fields if isinstance(record.at(name), str) or record.at(name) not in answers), None)
