"""The key under which a chat template reads the reasoning of an assistant's message."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megarl.data.messages import REASONING, REASONING_KEYS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def with_reasoning_key(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not any(REASONING in message for message in messages):
        return messages
    key = _reasoning_key(str(tokenizer.chat_template))
    return [{key if name == REASONING else name: value for name, value in message.items()} for message in messages]


@lru_cache(maxsize=8)
def _reasoning_key(template: str) -> str:
    patterns = {key: rf"""\.{key}\b|['"]{key}['"]""" for key in REASONING_KEYS}
    return next((key for key, pattern in patterns.items() if re.search(pattern, template)), REASONING)
