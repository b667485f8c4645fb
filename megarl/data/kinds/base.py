"""Common base of the kinds of training examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megarl.data.records import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenisedKind:
    """A kind of training data whose examples are sequences of tokens, at most `max_tokens` long."""

    tokenizer: Tokenizer
    system_prompt: str | None
    max_tokens: int
    is_judged: ClassVar[bool] = False

    def prompt(self, record: Record) -> Sequence[Mapping[str, Any]]:
        """Return the messages before the answer."""
        return record.prompt(self.system_prompt)

    def sequences(self, example: Any) -> Any:
        """Return an example's sequences. Most examples are sequences themselves."""
        return example
