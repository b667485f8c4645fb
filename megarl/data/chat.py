"""Conversations rendered through a tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder; DataError if it is missing, broken or has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise DataError(f"{folder}: the tokenizer does not load ({error}); copy the tokenizer files there") from error
    if not tokenizer.chat_template:
        raise DataError(f"{folder}: the tokenizer has no chat template; add a chat_template.jinja to the folder")
    return tokenizer


def render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool) -> str:
    """The text of a conversation; `generation_prompt` opens the assistant's next turn.

    Raises ValueError where the template refuses the conversation (an order of roles it does not know, say).
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=generation_prompt, tokenize=False
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error
    assert isinstance(text, str)
    return text


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of rendered text; the template has already written every special token."""
    return tokenizer.encode(text, add_special_tokens=False)
