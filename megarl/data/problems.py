"""Problems for reinforcement learning: prompts with gold answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.chat import encode, exceeds, render
from megarl.data.formats import FieldNames
from megarl.data.records import Record, TooLongError, read_records
from megarl.data.streamed import Collect, in_memory
from megarl.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

MADE = "environment:"
"""Prefix of a data source `environment:COUNT`: the environment makes its problems."""
MAX_MADE = 1_000_000
"""Maximum number of problems made by an environment for one data set."""
FIRST_HELDOUT = 1_000_000_000
"""Number of the first validation problem made by an environment. Training problems have lower numbers."""


def num_made(source: str) -> int | None:
    """Return COUNT of a data source `environment:COUNT`, or None for a file. Raises ValueError for an invalid count."""
    if not source.startswith(MADE):
        return None
    count = source.removeprefix(MADE)
    if not re.fullmatch(r"[1-9]\d*", count) or int(count) > MAX_MADE:
        raise ValueError(f"{count!r} is not a valid number of problems; give a whole number from 1 to {MAX_MADE}")
    return int(count)


def made_problems(count: int, tokenizer: Tokenizer, *, system_prompt: str | None, is_heldout: bool) -> list[Problem]:
    """Return problems for which the environment makes the prompt from the problem's number.

    `record` of a problem has the `split`, train or validation. The user's message is a placeholder for the
    environment's own prompt.
    """
    messages: tuple[dict[str, str], ...] = ({"role": "user", "content": "(a problem of the environment)"},)
    if system_prompt is not None:
        messages = ({"role": "system", "content": system_prompt}, *messages)
    prompt = tuple(encode(tokenizer, render(tokenizer, messages, generation_prompt=True)))
    record = {"split": "validation" if is_heldout else "train"}
    first = FIRST_HELDOUT if is_heldout else 0
    return [Problem(first + number, messages, prompt, "", record) for number in range(count)]


def read_problems(
    source: str | Path,
    tokenizer: Tokenizer,
    *,
    system_prompt: str | None,
    max_prompt_tokens: int,
    name: str = "",
    needed: str | None = None,
    has_answers: bool = True,
    names: FieldNames | None = None,
    on_long: Callable[[TooLongError], object] | None = None,
    collect: Collect = in_memory,
) -> Sequence[Problem]:
    """Return the problems of a data source. Prompts are rendered up to the opening of the assistant's turn.

    `name` is the problems' `source`. `needed` is a field required in each record. With `has_answers` a gold answer is
    required too; otherwise answers are empty.

    Raises DataError, with the line, for an invalid record and for a conversation ending with the assistant's turn. A
    prompt longer than `max_prompt_tokens` is never truncated: `on_long` is called with the error, or without `on_long`
    it is raised.
    """

    def make(index: int, record: Record) -> Problem:
        if needed is not None and needed not in record.fields:
            raise record.error(
                f"has no field {needed!r}, named by data.curriculum.by; add it to every record, or name another field"
            )
        made = make_problem(
            record,
            index,
            tokenizer,
            system_prompt=system_prompt,
            max_prompt_tokens=max_prompt_tokens,
            has_answer=has_answers,
        )
        return replace(made, source=name) if name else made

    return collect(read_records(source, names), make, on_long)


def make_problem(
    record: Record,
    index: int,
    tokenizer: Tokenizer,
    *,
    system_prompt: str | None,
    max_prompt_tokens: int,
    has_answer: bool = True,
) -> Problem:
    """Return a record as a problem. Raises DataError, and TooLongError for a prompt longer than `max_prompt_tokens`."""
    record.require("prompt", *(["answer"] if has_answer else []))
    answer, messages = record.answer() if has_answer else "", record.prompt(system_prompt)
    if messages[-1]["role"] not in ("user", "tool"):
        raise record.error(f"the last message has role '{messages[-1]['role']}'; end with the user's or a tool's")
    try:
        text = render(tokenizer, messages, generation_prompt=True)
        # Encoding a text of megabytes takes minutes; `exceeds` refuses it after its beginning.
        is_long = exceeds(tokenizer, text, max_prompt_tokens)
        prompt = [] if is_long else encode(tokenizer, text)
    except ValueError as error:
        raise record.error(str(error)) from error
    if is_long or len(prompt) > max_prompt_tokens:
        size = f"{len(text)} characters" if is_long else f"{len(prompt)} tokens"
        raise record.error(
            f"the prompt has {size}, data.max_prompt_tokens allows {max_prompt_tokens} tokens; "
            "raise it, remove the line, or set data.overlong=drop",
            TooLongError,
        )
    return Problem(index, messages, tuple(prompt), answer, record.fields)
