"""Answered conversations of a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from megarl.serving.conversation import Conversation

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EXCERPT = 160
"""Characters shown of each of two different messages at a fork."""

ForkReason = Literal["tools", "system", "history"]
"""Where the client changed an earlier conversation: tools, system message, or a later message."""


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredConversation:
    """A conversation up to an answer, its tokens, int32 [prompt + new_tokens], and the number of its call."""

    conversation: Conversation
    token_ids: NDArray[np.int32]
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredText:
    """A text prompt with its completion, their tokens, int32 [prompt + new_tokens], and the number of the call."""

    text: str
    token_ids: NDArray[np.int32]
    number: int


@dataclass(frozen=True, slots=True)
class Fork:
    """A request that continues no answered conversation of its session. `text` describes the first difference."""

    reason: ForkReason
    text: str


class History:
    """Answered conversations and text prompts of a session, with their token ids.

    A request that continues an answered conversation repeats its token ids exactly as sampled. Its text is not encoded
    again.
    """

    def __init__(self) -> None:
        self._answered_conversations: list[AnsweredConversation] = []
        self._answered_by_digest: dict[bytes, list[AnsweredConversation]] = {}
        self._texts: list[AnsweredText] = []

    def add(self, answered: AnsweredConversation) -> None:
        self._answered_conversations.append(answered)
        self._answered_by_digest.setdefault(answered.conversation.hash_beginnings()[-1], []).append(answered)

    def find(self, conversation: Conversation) -> AnsweredConversation | None:
        """Return the longest answered conversation that `conversation` continues, the newest of equals, or None."""
        # From the longest beginning to the shortest, without the whole conversation: its last message is new.
        for digest in conversation.hash_beginnings()[-2:0:-1]:
            # Newest first: an agent that asked twice continues the later answer.
            for answered in reversed(self._answered_by_digest.get(digest, ())):
                if conversation.has_reasoning_of(answered.conversation):
                    return answered
        return None

    def find_fork(self, conversation: Conversation, continued: AnsweredConversation | None) -> Fork | None:
        """Compare a conversation with the most similar answered one. Returns the difference, or None if it continues
        one.

        Repeating an answered question is not a fork. `continued` is the result of `find`.
        """
        if not self._answered_conversations:
            return None
        num_common_messages, nearest_index = max(
            (
                (conversation.count_common_messages(answered.conversation), index)
                for index, answered in enumerate(self._answered_conversations)
            )
        )
        nearest_conversation = self._answered_conversations[nearest_index].conversation
        if num_common_messages >= min(len(conversation.keys), len(nearest_conversation.keys)):
            # Either the reasoning differs, or the client repeats an answered question.
            is_fork = continued is None and len(conversation.keys) > num_common_messages
            return Fork("history", "reasoning differs") if is_fork else None
        if all(answered.conversation.tools != conversation.tools for answered in self._answered_conversations):
            return Fork("tools", "the tools are others than before")
        differing_texts = nearest_conversation.keys[num_common_messages], conversation.keys[num_common_messages]
        # Start 20 characters before the difference, so that the reader recognises the place.
        excerpt_start = max(
            0,
            next(
                (
                    index
                    for index, (earlier_character, character) in enumerate(zip(*differing_texts, strict=False))
                    if earlier_character != character
                ),
                0,
            )
            - 20,
        )
        text_before, text_now = (text[excerpt_start : excerpt_start + _EXCERPT] for text in differing_texts)
        is_system = num_common_messages == 0 and conversation.messages[0]["role"] == "system"
        reason: ForkReason = "system" if is_system else "history"
        role = conversation.messages[num_common_messages]["role"]
        return Fork(reason, f"message {num_common_messages} ({role}) was …{text_before} and is …{text_now}")

    def add_text(self, answered: AnsweredText) -> None:
        self._texts.append(answered)

    def find_text(self, prompt: str) -> AnsweredText | None:
        matches = [stored_text for stored_text in self._texts if prompt.startswith(stored_text.text)]
        return max(matches, key=lambda stored_text: len(stored_text.text), default=None)
