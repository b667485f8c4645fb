"""Prompts for reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.chat import encode, exceeds, render
from megarl.data.records import read_records
from megarl.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def read_problems(
    path: str | Path, tokenizer: Tokenizer, *, answer_field: str, system_prompt: str | None, max_prompt_tokens: int
) -> list[Problem]:
    """The problems of a JSONL file, prompts rendered up to the opening of the assistant's turn.

    Raises DataError, with the line, for a faulty record, a conversation that does not end with what must be answered,
    and a prompt longer than `max_prompt_tokens`: prompts are never cut.
    """
    problems = []
    for index, record in enumerate(read_records(path)):
        answer, messages = record.text(answer_field), record.messages(system_prompt)
        if messages[-1]["role"] not in ("user", "tool"):
            raise record.error(f"the last message has role '{messages[-1]['role']}'; end with the user's or a tool's")
        try:
            text = render(tokenizer, messages, generation_prompt=True)
            is_long = exceeds(tokenizer, text, max_prompt_tokens)
            prompt = [] if is_long else encode(tokenizer, text)
        except ValueError as error:
            raise record.error(str(error)) from error
        if is_long or len(prompt) > max_prompt_tokens:
            size = f"{len(text)} characters" if is_long else f"{len(prompt)} tokens"
            raise record.error(
                f"the prompt has {size}, data.max_prompt_tokens allows {max_prompt_tokens} tokens; "
                f"raise it or remove the line"
            )
        problems.append(Problem(index, messages, tuple(prompt), answer, record.fields))
    return problems
