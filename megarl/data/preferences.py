"""Pairs of answers, one of them preferred."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.conversations import train_on_assistant
from megarl.data.records import Record, read_records
from megarl.types import TrainingSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Pair = tuple[TrainingSequence, TrainingSequence]
"""The chosen and the rejected conversation."""


def read_preferences(
    path: str | Path, tokenizer: Tokenizer, *, system_prompt: str | None, max_tokens: int
) -> list[Pair]:
    """The pairs of a JSONL file, with the tokens of the two answers marked for training.

    A record has `chosen` and `rejected`: texts, or messages; and what both answer in `messages`, `prompt` or `context`,
    unless both begin with it. Raises DataError, with the line, for a faulty record, two equal answers, and a pair of
    more than `max_tokens` together: a pair is never parted, nor cut.
    """
    pairs = []
    for record in read_records(path):
        chosen, rejected = (_conversation(record, field, system_prompt) for field in ("chosen", "rejected"))
        if chosen == rejected:
            raise record.error("'chosen' and 'rejected' are the same; remove the line")
        shared = next(
            (place for place, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
            min(len(chosen), len(rejected)),
        )
        try:
            pair = tuple(train_on_assistant(tokenizer, messages, first=shared) for messages in (chosen, rejected))
        except ValueError as error:
            raise record.error(str(error)) from error
        if (size := sum(map(len, pair))) > max_tokens:
            raise record.error(
                f"the pair has {size} tokens, trainer.max_tokens_per_microbatch allows {max_tokens}; "
                "raise it or remove the line"
            )
        pairs.append((pair[0], pair[1]))
    return pairs


def _conversation(record: Record, field: str, system_prompt: str | None) -> tuple[Mapping[str, Any], ...]:
    """The whole conversation that ends with one of the answers."""
    given = next((name for name in ("messages", "prompt", "context") if name in record.fields), None)
    before = record.messages(system_prompt, field=given, role="user") if given else ()
    answer = record.messages(None if before else system_prompt, field=field, role="assistant")
    if not before or answer[0]["role"] == "assistant":
        return (*before, *answer)
    start = record.messages(field=given, role="user") if given else ()
    if answer[: len(start)] != start:
        raise record.error(f"'{field}' neither continues '{given}' nor begins with it; give the answer alone")
    return (*before, *answer[len(start) :])
