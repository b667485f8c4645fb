"""The prompts that a session answered, found again in what a client sends next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from megarl.serving.conversation import Conversation

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EXCERPT = 160

ForkReason = Literal["tools", "system", "history"]


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """A conversation up to an answer, and its tokens, int32 [prompt + new_tokens]."""

    conversation: Conversation
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a conversation parts from all that were answered: why, and both messages there."""

    reason: ForkReason
    text: str


class History:
    """Conversations and texts that were answered, by what they begin with."""

    def __init__(self) -> None:
        self._answered: list[Answered] = []
        self._by_digest: dict[bytes, list[Answered]] = {}
        self._texts: list[tuple[str, NDArray[np.int32]]] = []

    def add(self, answered: Answered) -> None:
        """Remember a conversation whose last message is the answer."""
        self._answered.append(answered)
        self._by_digest.setdefault(answered.conversation.digests()[-1], []).append(answered)

    def find(self, conversation: Conversation) -> Answered | None:
        """The longest answered conversation that this one continues; of equal ones the newest."""
        for digest in conversation.digests()[-2:0:-1]:
            for answered in reversed(self._by_digest.get(digest, ())):
                if conversation.has_reasoning_of(answered.conversation):
                    return answered
        return None

    def fork(self, conversation: Conversation, known: Answered | None) -> Fork | None:
        """Where a conversation differs from the answered one that it has most in common with; None: it continues one.

        Nor is it a fork to ask again what was answered. `known` is what `find` finds for it.
        """
        if not self._answered:
            return None
        common, nearest = max(
            ((conversation.common_messages(a.conversation), number) for number, a in enumerate(self._answered))
        )
        other = self._answered[nearest].conversation
        if common >= min(len(conversation.keys), len(other.keys)):
            # The same words, but for reasoning; or the same question again.
            is_fork = known is None and len(conversation.keys) > common
            return Fork("history", "reasoning differs") if is_fork else None
        if all(answered.conversation.tools != conversation.tools for answered in self._answered):
            return Fork("tools", "the tools are others than before")
        texts = other.keys[common], conversation.keys[common]
        start = max(0, next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0) - 20)
        was, now = (text[start : start + _EXCERPT] for text in texts)
        reason: ForkReason = "system" if common == 0 and conversation.messages[0]["role"] == "system" else "history"
        return Fork(reason, f"message {common} ({conversation.messages[common]['role']}) was …{was} and is …{now}")

    def add_text(self, text: str, token_ids: NDArray[np.int32]) -> None:
        """Remember a prompt and its completion as text, and their tokens [tokens]."""
        self._texts.append((text, token_ids))

    def find_text(self, prompt: str) -> tuple[str, NDArray[np.int32]] | None:
        """The longest text that a prompt begins with, and its tokens; None: there is none."""
        found = [known for known in self._texts if prompt.startswith(known[0])]
        return max(found, key=lambda known: len(known[0]), default=None)
