"""Conversations for supervised fine-tuning, with a mask of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.chat import encode_rendered, exceeds_token_limit, render
from megarl.data.formats import first_name_with_value
from megarl.data.kinds.base import TokenisedKind
from megarl.data.messages import REASONING, WEIGHT, have_same_texts, is_blank, without_weights
from megarl.data.records import Record, TooLongError
from megarl.data.templates.turn_ends import check_opens_turns, cut_after_turn
from megarl.data.templates.written_texts import (
    check_answer_written,
    check_messages_written,
    check_tools_written,
    has_texts,
)
from megarl.types import DataError, TrainingSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


_JUDGEMENTS = ("label", "kto_tag")
"""Fields that say whether the answer is good, in TRL and LLaMA-Factory."""
Conversation = tuple[TrainingSequence, ...]
"""A record's sequences: one, or several if the chat template rewrites earlier turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations(TokenisedKind):
    """Conversations as tokens, with the assistant's tokens marked for training.

    A record has a conversation, or a prompt and a response; each is a text or messages (`data.formats`). Assistant
    messages may have `tool_calls`, and a record may list its `tools`. A conversation without an assistant turn, or
    longer than `max_tokens`, is an error.
    """

    def make(self, index: int, record: Record) -> Conversation:
        messages = conversation_messages(record, self.system_prompt)
        return make_conversation(record, self.tokenizer, messages, max_tokens=self.max_tokens)

    def parts(self, record: Record) -> list[Any]:
        messages = conversation_messages(record, self.system_prompt)
        check_is_trained(record, messages, first_trained=0)
        return list(messages)


def make_conversation(
    record: Record,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int,
    first_trained: int = 0,
) -> Conversation:
    """Return a record's messages as tokens. Assistant messages from `first_trained` on are trained.

    Raises DataError, with the line, for invalid messages, and TooLongError above `max_tokens`.
    """
    sequences = encode_conversation(record, tokenizer, messages, max_tokens=max_tokens, first_trained=first_trained)
    if (longest := max(map(len, sequences))) > max_tokens:
        raise _make_too_long_error(record, f"{longest} tokens", max_tokens)
    return sequences


def encode_conversation(
    record: Record, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, first_trained: int
) -> Conversation:
    """Return messages as tokens, encoded by `encode_with_assistant_mask`.

    Raises DataError, with the line, for invalid messages. Raises TooLongError for a conversation far longer than
    `max_tokens`, before encoding it takes minutes.
    """
    tools = record.tools()
    try:
        text = render(tokenizer, without_weights(messages), generation_prompt=False, tools=tools)
        if exceeds_token_limit(tokenizer, text, max_tokens):
            raise _make_too_long_error(record, f"{len(text)} characters", max_tokens)
        check_tools_written(tools, text)
        # `encode_with_assistant_mask` checks the assistant's messages, each in its own turn.
        check_messages_written(messages, text)
        return encode_with_assistant_mask(tokenizer, messages, first_trained=first_trained, tools=tools)
    except ValueError as error:
        raise record.error(str(error)) from error


def _make_too_long_error(record: Record, size: str, max_tokens: int) -> DataError:
    return record.error(
        f"the conversation has {size}, trainer.max_tokens_per_microbatch allows {max_tokens} tokens; "
        "raise it, remove the line, or set data.overlong=drop",
        TooLongError,
    )


def conversation_messages(record: Record, system_prompt: str | None) -> tuple[Mapping[str, Any], ...]:
    """Return a record's conversation: its messages, or its prompt and its response. Raises DataError."""
    if not first_name_with_value(record.fields, record.format.prompt):
        record.require("prompt", "response")
    _refuse_bad_answer(record)
    prompt = record.prompt(system_prompt)
    messages = (*prompt, *_read_response(record, prompt))
    record.refuse_other_prompts(messages, with_answers=True)
    record.refuse_reasoning_field(messages)
    record.refuse_unlisted_calls(messages)
    refuse_empty_answers(record, messages)
    return messages


def _refuse_bad_answer(record: Record) -> None:
    """Raise DataError for an answer that the record judges bad, as data sets for KTO have them."""
    for name in _JUDGEMENTS:
        value = record.fields.get(name)
        # Tables in CSV have only texts.
        is_bad = value is False or (isinstance(value, str) and value.strip().casefold() == "false")
        if is_bad and name not in record.names.fields.values():
            raise record.error(
                f"'{name}' is false, so the answer is a bad one, and supervised training would learn it; remove the "
                "record (or the field, if it judges something else), or train with loop=preference and "
                "preference.loss=kto"
            )


def _read_response(record: Record, prompt: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages that a record's response adds to its prompt. Empty: the prompt is the whole conversation."""
    if record.value(record.format.response) is None:
        # A field with one of these names has a whole conversation. If it lacks an answer, a later check names its line.
        is_whole_conversation = record.field(record.format.prompt) in ("messages", "conversations")
        if is_whole_conversation or any(message["role"] == "assistant" for message in prompt):
            return ()
    record.require("response")
    field = record.field(record.format.response)
    record.refuse_other_responses(field)
    return new_messages(record, prompt, record.messages(field, role="assistant"), field)


def new_messages(
    record: Record, prompt: Sequence[Mapping[str, Any]], answer: Sequence[Mapping[str, Any]], field: str
) -> tuple[Mapping[str, Any], ...]:
    """Return the messages that the answer in `field` adds to the prompt. Empty: the prompt already ends with them.

    Raises DataError if the prompt ends with another answer.
    """
    if prompt[-1]["role"] != "assistant":
        return tuple(answer)
    if have_same_texts(prompt[-len(answer) :], answer):
        return ()
    raise record.error(
        f"'{record.field(record.format.prompt)}' ends with an answer, and '{field}' has another one; remove one of them"
    )


def encode_with_assistant_mask(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    first_trained: int = 0,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Conversation:
    """Return a conversation as tokens up to its last assistant turn, with a mask of the tokens to train.

    The mask marks the assistant's tokens and end-of-turn tokens, except in turns before message `first_trained` and in
    messages with `weight` 0. `tools` are JSON schemas of the tools that the assistant may call.

    Prompt and turn are encoded separately, as in sampling, so no token spans their border. The prompt is the text of
    the earlier messages with a generation prompt. White space after the end of a turn (a newline in ChatML) belongs to
    the next prompt.

    Some templates render a message differently once more messages follow, for example without its reasoning. Then a new
    sequence begins. Sequences without a turn to train are left out.

    Raises ValueError if no turn is to be trained. Raises it too if the template leaves out a text or the end of a turn,
    or if a rendered turn does not begin with its prompt.
    """
    refuse_untrained(messages, first_trained=first_trained)
    check_opens_turns(tokenizer)
    sequences = [_Sequence()]
    is_trained = [
        message_index >= first_trained and _is_trained(message) for message_index, message in enumerate(messages)
    ]
    messages = without_weights(messages)
    for message_index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:message_index], generation_prompt=True, tools=tools)
        up_to_turn = messages[: message_index + 1]
        rendered = render(tokenizer, up_to_turn, generation_prompt=False, tools=tools)
        if not rendered.startswith(prompt):
            raise ValueError(
                f"the chat template writes messages[{message_index}] without the prompt that opens the turn in "
                "sampling, so the trained tokens would never be sampled; use a template that only appends"
            )
        next_message = messages[message_index + 1] if message_index + 1 < len(messages) else None
        rendered_to_turn_end = cut_after_turn(tokenizer, rendered, up_to_turn, len(prompt), next_message, tools)
        if not has_texts(rendered_to_turn_end[len(prompt) :], message):
            # The generation prompt may contain the message's beginning, so this check renders once more.
            check_answer_written(tokenizer, up_to_turn, tools, rendered_to_turn_end)
        if not prompt.startswith(sequences[-1].text):
            sequences.append(_Sequence())
        sequences[-1].extend(tokenizer, prompt, is_trained=False)
        # Encoded apart, as in sampling: a token across the border would never have been sampled.
        sequences[-1].extend(tokenizer, rendered_to_turn_end, is_trained=is_trained[message_index])
    trained_sequences = tuple(sequence.to_training_sequence() for sequence in sequences if any(sequence.mask))
    if not trained_sequences:
        raise ValueError("the assistant's messages have no tokens, so nothing is trained; remove the record")
    return trained_sequences


def check_is_trained(record: Record, messages: Sequence[Mapping[str, Any]], *, first_trained: int) -> None:
    """Raise DataError, with the line, if no assistant's message from `first_trained` on is trained."""
    try:
        refuse_untrained(messages, first_trained=first_trained)
    except ValueError as error:
        raise record.error(str(error)) from error


def refuse_untrained(messages: Sequence[Mapping[str, Any]], *, first_trained: int = 0) -> None:
    """Raise ValueError if no assistant's message from `first_trained` on is trained."""
    if any(map(_is_trained, messages[first_trained:])):
        return
    if any(WEIGHT in message for message in messages):
        raise ValueError("the assistant's messages have weight 0, so nothing is trained; remove the record")
    raise ValueError("no message has the role assistant; fine-tuning needs an assistant's answer to train on")


def refuse_empty_answers(record: Record, messages: Sequence[Mapping[str, Any]], *, first_trained: int = 0) -> None:
    """Raise DataError for an empty answer from message `first_trained` on: it would teach the policy to end at once."""
    answers = [
        (message_index, message)
        for message_index, message in enumerate(messages)
        if message_index >= first_trained and _is_trained(message)
    ]
    for message_index, message in answers:
        if all(is_blank(message.get(key)) for key in ("content", "tool_calls", REASONING)):
            weight_remedy = ', or give "weight": 0 at the message' if len(answers) > 1 else ""
            raise record.error(
                f"messages[{message_index}] is an assistant's message without text; give the answer, remove the "
                f"record{weight_remedy}"
            )


def _is_trained(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and WEIGHT not in message


@dataclass(slots=True)
class _Sequence:
    """A sequence that grows turn by turn."""

    text: str = ""
    """The rendered text so far."""
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)

    def extend(self, tokenizer: Tokenizer, text: str, *, is_trained: bool) -> None:
        """Append the tokens that `text` adds to the text so far."""
        piece = encode_rendered(tokenizer, text[len(self.text) :])
        self.tokens += piece
        self.mask += [is_trained] * len(piece)
        self.text = text

    def to_training_sequence(self) -> TrainingSequence:
        return TrainingSequence(np.array(self.tokens, dtype=np.int64), np.array(self.mask, dtype=np.bool_))
