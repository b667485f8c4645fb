"""The answers of a session's model calls, from prompts that may continue an earlier answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.serving.answer_reader import read_chat, read_text
from megarl.serving.answers import Answer
from megarl.serving.codec import Codec
from megarl.serving.conversation import Conversation
from megarl.serving.history import AnsweredConversation, AnsweredText, History
from megarl.serving.session_journal import SessionJournal, make_request_facts
from megarl.serving.session_sampler import SessionSampler
from megarl.types import Caller, SamplingSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray


class AnswerSampler:
    """Samples answers to the conversations and text prompts of session `name`, and remembers them for later prompts.

    A prompt that continues an earlier answer begins with the tokens of that answer. `on_continued` is called with the
    number of its call. `counts` gets the numbers of forks, `fork_texts` their descriptions.
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        sampler: SessionSampler,
        journal: SessionJournal | None,
        *,
        counts: Counter[str],
        fork_texts: list[str],
        on_continued: Callable[[int], None],
    ) -> None:
        self._name, self._codec, self._sampler, self._journal = name, codec, sampler, journal
        self._counts, self._fork_texts, self._on_continued = counts, fork_texts, on_continued
        self._history = History()

    def remember_chat(self, conversation: Conversation, answer: Answer) -> None:
        answered_conversation = conversation.with_messages([answer.message])
        token_ids = answer.call.token_ids.astype(np.int32)
        self._history.add(AnsweredConversation(answered_conversation, token_ids, answer.number))

    def remember_text(self, prompt: str | NDArray[np.int32], answer: Answer) -> None:
        if isinstance(prompt, str):
            token_ids = answer.call.token_ids.astype(np.int32)
            self._history.add_text(AnsweredText(prompt + answer.text, token_ids, answer.number))

    async def make_prompt(self, conversation: Conversation) -> NDArray[np.int32]:
        """Return a conversation's prompt tokens [prompt]. They begin with those of an earlier answer that it continues.

        Raises RequestError if the conversation or its tools are invalid, or if the prompt is too long.
        """
        self._codec.check_tools(conversation.tools)
        return await self._make_prompt_tokens(conversation, self._history.find(conversation))

    async def _make_prompt_tokens(
        self, conversation: Conversation, earlier_answer: AnsweredConversation | None
    ) -> NDArray[np.int32]:
        """Return a conversation's prompt tokens [prompt], which begin with the tokens of `earlier_answer`."""
        # Appending to recorded tokens keeps a trajectory one sequence. Rendering again could change the tokens.
        if earlier_answer is None:
            return await self._codec.encode_opening(conversation)
        new_messages = conversation.messages[len(earlier_answer.conversation.messages) :]
        return await self._codec.append_messages(earlier_answer.token_ids, new_messages, conversation.tools)

    async def answer_chat(
        self,
        call_number: int,
        conversation: Conversation,
        sampling: SamplingSettings,
        caller: Caller,
        request_digest: bytes,
    ) -> Answer:
        """Sample an answer to a conversation. If it continues an earlier answer, reuse that answer's tokens."""
        self._codec.check_tools(conversation.tools)
        earlier_answer = self._history.find(conversation)
        if earlier_answer is not None:
            self._on_continued(earlier_answer.number)
        if fork := self._history.find_fork(conversation, earlier_answer):
            self._counts["forks"] += 1
            self._counts[f"forks/{fork.reason}"] += 1
            self._fork_texts.append(fork.text)
        token_ids = await self._make_prompt_tokens(conversation, earlier_answer)
        continued_number = None if earlier_answer is None else earlier_answer.number
        num_known_messages = 0 if earlier_answer is None else len(earlier_answer.conversation.messages)
        self._journal_request(
            call_number,
            digest=request_digest,
            caller=caller,
            continued=continued_number,
            sampling=sampling,
            messages=conversation.messages[num_known_messages:],
            # A continuing conversation has the same tools.
            tools=conversation.tools if earlier_answer is None else (),
        )
        call = await self._sampler.sample(self._name, call_number, token_ids, sampling)
        return await read_chat(self._codec, call_number, call, conversation, sampling.stop, caller, continued_number)

    async def answer_text(
        self,
        call_number: int,
        prompt: str | NDArray[np.int32],
        sampling: SamplingSettings,
        caller: Caller,
        request_digest: bytes,
    ) -> Answer:
        """Sample a completion of a prompt for request `call_number`. It reuses the token ids of an earlier text.

        `request_digest` identifies repeats. It is written to the journal, and so is `caller`.
        """
        continued_number = None
        if not isinstance(prompt, str):
            token_ids = prompt
        elif (continued_text := self._history.find_text(prompt)) is not None:
            continued_number = continued_text.number
            self._on_continued(continued_number)
            added_ids = await self._codec.encode_text(prompt[len(continued_text.text) :])
            token_ids = np.concatenate([continued_text.token_ids, added_ids])
        else:
            token_ids = await self._codec.encode_text(prompt)
        self._journal_request(
            call_number,
            digest=request_digest,
            caller=caller,
            continued=continued_number,
            sampling=sampling,
            text=prompt if isinstance(prompt, str) else None,
        )
        call = await self._sampler.sample(self._name, call_number, token_ids, sampling)
        return await read_text(self._codec, call_number, call, sampling.stop, caller)

    def _journal_request(self, number: int, **facts: Any) -> None:
        if self._journal is not None:
            self._journal.record_request(f"{self._name}.{number}", make_request_facts(number, **facts))
