"""Dialogues for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.chat import encode, exceeds, render
from megarl.data.formats import FieldNames, first_of
from megarl.data.records import Record, TooLongError, read_records
from megarl.data.streamed import Collect, in_memory
from megarl.types import DataError, TrainingSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def read_conversations(
    source: str | Path,
    tokenizer: Tokenizer,
    *,
    system_prompt: str | None,
    max_tokens: int,
    names: FieldNames | None = None,
    on_long: Callable[[TooLongError], object] | None = None,
    collect: Collect = in_memory,
) -> Sequence[TrainingSequence]:
    """The conversations of a data source, with the assistant's tokens marked for training.

    A record has a conversation, or a prompt and a response, texts or messages (`data.formats`); assistant's messages
    may have `tool_calls`, and the record the `tools` that it may call. Raises DataError, with the line, for a faulty
    record, one without an assistant turn, and a chat template that rewrites earlier turns. One longer than `max_tokens`
    is never cut: `on_long` is told of it, or it is an error.
    """

    def make(_: int, record: Record) -> TrainingSequence:
        return conversation_of(record, tokenizer, conversation_messages(record, system_prompt), max_tokens=max_tokens)

    return collect(read_records(source, names), make, on_long)


def conversation_of(
    record: Record, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, first: int = 0
) -> TrainingSequence:
    """A record's messages as `train_on_assistant` has them; DataError, with the line, where they are faulty or long."""
    sequence = encoded(record, tokenizer, messages, max_tokens=max_tokens, first=first)
    if len(sequence) > max_tokens:
        raise _too_long(record, f"{len(sequence)} tokens", max_tokens)
    return sequence


def encoded(
    record: Record, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, first: int
) -> TrainingSequence:
    """A record's messages as `train_on_assistant` has them; DataError, with the line, where they are faulty.

    One that is far longer than `max_tokens` is refused before it is encoded: that could take minutes.
    """
    tools = record.tools()
    try:
        text = render(tokenizer, messages, generation_prompt=False, tools=tools)
        if exceeds(tokenizer, text, max_tokens):
            raise _too_long(record, f"{len(text)} characters", max_tokens)
        return train_on_assistant(tokenizer, messages, first=first, tools=tools)
    except ValueError as error:
        raise record.error(str(error)) from error


def _too_long(record: Record, size: str, max_tokens: int) -> DataError:
    return record.error(
        f"the conversation has {size}, trainer.max_tokens_per_microbatch allows {max_tokens} tokens; "
        "raise it, remove the line, or set data.overlong=drop",
        TooLongError,
    )


def conversation_messages(record: Record, system_prompt: str | None) -> tuple[Mapping[str, Any], ...]:
    """A record's conversation: as it is, or a prompt and its response. Raises DataError."""
    if not first_of(record.fields, record.format.prompt):
        record.require("prompt", "response")
    prompt = record.prompt(system_prompt)
    if any(message["role"] == "assistant" for message in prompt) and record.value(record.format.response) is None:
        return prompt
    if record.field(record.format.prompt) in ("messages", "conversations"):
        return prompt
    record.require("response")
    return (*prompt, *record.messages(field=record.field(record.format.response), role="assistant"))


def train_on_assistant(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    first: int = 0,
    tools: Sequence[Mapping[str, Any]] = (),
) -> TrainingSequence:
    """A conversation up to its last assistant turn; the mask covers what the assistant says and its end-of-turn token.

    Turns before message `first` are not trained. `tools` are JSON schemas of what the assistant may call.

    Each turn follows exactly the tokens that sampling would show the model, the messages before it with a generation
    prompt; so prompt and turn are encoded apart, and no token spans their border. White space that the template puts
    after the end of turn (a newline, in ChatML) belongs to the next prompt.

    Raises ValueError if there is no assistant turn, or if the template renders earlier messages differently once more
    follow (it drops old reasoning, say): then no single sequence shows every turn its own prompt.
    """
    text, tokens, mask = "", [], []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:place], generation_prompt=True, tools=tools)
        rendered = render(tokenizer, messages[: place + 1], generation_prompt=False, tools=tools)
        turn = _without_trailing_space(tokenizer, rendered)
        if not prompt.startswith(text) or not turn.startswith(prompt):
            raise ValueError(
                f"the chat template rewrites what stands before messages[{place}] once that message is there; "
                f"give each assistant turn a record of its own, or use a template that only appends"
            )
        for piece, trained in ((prompt[len(text) :], False), (turn[len(prompt) :], place >= first)):
            piece_tokens = encode(tokenizer, piece)
            tokens += piece_tokens
            mask += [trained] * len(piece_tokens)
        text = turn
    if not any(mask):
        raise ValueError("no message is the assistant's; fine-tuning needs an answer to learn")
    return TrainingSequence(np.array(tokens, dtype=np.int64), np.array(mask, dtype=np.bool_))


def _without_trailing_space(tokenizer: Tokenizer, text: str) -> str:
    """The text up to its end-of-turn token, where it has one."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(tuple(tokenizer.all_special_tokens)) else text
