"""A conversation that grows turn by turn, as token ids: what stands there is never encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.chat import encode, render

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase as Tokenizer

_TURN = "\ufdd2"
"""Stands for an assistant's turn. Unicode keeps it out of all text."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The tokens that a chat template writes around an assistant's sampled turns."""

    tokenizer: Tokenizer

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        """Token ids [prompt] of messages up to the opening of the assistant's turn.

        Raises ValueError where the template refuses them.
        """
        return np.array(encode(self.tokenizer, render(self.tokenizer, messages, generation_prompt=True)), np.int32)

    def observation(self, token_ids: NDArray[np.int32], messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        """Token ids that follow `token_ids` [tokens], which end with an assistant's turn, when `messages` answer it.

        They end with the opening of the next turn, and begin with the turn's end token where the turn, cut by its
        length, has none. Raises ValueError where the template does not write messages after a turn.
        """
        turn = ({"role": "user", "content": "."}, {"role": "assistant", "content": _TURN})
        text = render(self.tokenizer, (*turn, *messages), generation_prompt=True)
        _, found, following = text.partition(_TURN)
        if not found or _TURN in following:
            raise ValueError("the chat template does not write an assistant's turn once and as it is")
        added = np.array(encode(self.tokenizer, following), np.int32)
        has_ended = len(token_ids) > 0 and len(added) > 0 and token_ids[-1] == added[0]
        return added[1:] if has_ended else added

    def text(self, token_ids: NDArray[np.int64]) -> str:
        """The text of sampled tokens, without special tokens."""
        decoded = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(decoded, str)
        return decoded
