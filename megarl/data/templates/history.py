"""Tests on sample conversations whether a chat template changes earlier turns.

Templates drop reasoning before a new question, close a conversation with their own token, or begin a turn differently
from the generation prompt. Then the template's text differs from the tokens that a model sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.chat import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def _message(role: str, content: str, **other_keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **other_keys}


def _call_message(*numbers: int, thought: str = "") -> dict[str, Any]:
    calls = [
        # Nine letters and digits: Mistral's chat templates refuse any other id.
        {"id": f"call{call_number:05}", "type": "function", "function": {"name": "f", "arguments": {"x": call_number}}}
        for call_number in numbers
    ]
    return _message("assistant", "", tool_calls=calls) | ({"reasoning_content": thought} if thought else {})


def _reply(call_number: int) -> dict[str, Any]:
    return _message("tool", f"reply {call_number}", tool_call_id=f"call{call_number:05}", name="f")


_QUESTION, _NEXT = _message("user", "first"), _message("user", "second")
_ANSWER, _LAST = _message("assistant", "one"), _message("assistant", "two")
_THOUGHT = _message("assistant", "one", reasoning_content="hm")
CONVERSATIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "plain": (_QUESTION, _ANSWER, _NEXT, _LAST),
    "reasoning, then user": (_QUESTION, _THOUGHT, _NEXT, _LAST),
    "tool chain with reasoning": (
        _QUESTION, _call_message(1, thought="hm"), _reply(1), _call_message(2, thought="so"), _reply(2), _THOUGHT,
    ),
    "parallel tools": (_QUESTION, _call_message(1, 2), _reply(1), _reply(2), _ANSWER),
    "tools, then user": (_QUESTION, _call_message(1, thought="hm"), _reply(1), _THOUGHT, _NEXT, _LAST),
}  # fmt: skip
"""Sample conversations by kind, for example with tool calls."""


REFUSES = "refuses"
"""Result for a template that raises an error."""


def history_faults(tokenizer: Tokenizer) -> dict[str, str]:
    """Return how a chat template changes earlier turns, by kind of sample conversation.

    "rewrites the answer": the rendered answer does not begin with its prompt. "rewrites history": a later prompt does
    not begin with the text up to an earlier answer (trailing space ignored). "refuses": the template raises an error.
    """
    faults = {
        conversation_kind: _describe_template_fault(tokenizer, messages)
        for conversation_kind, messages in CONVERSATIONS.items()
    }
    return {conversation_kind: fault for conversation_kind, fault in faults.items() if fault}


def _describe_template_fault(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return how the chat template changes earlier text when messages are added; empty if it only appends."""
    answer_indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        prompts = {index: render(tokenizer, messages[:index], generation_prompt=True) for index in answer_indices}
        rendered_answers = {
            index: render(tokenizer, messages[: index + 1], generation_prompt=False) for index in answer_indices
        }
    except ValueError:
        return REFUSES
    # A template that only appends repeats each prompt at an answer's start, and each answer in later prompts.
    begins_with_prompt = all(rendered_answers[index].startswith(prompts[index]) for index in answer_indices)
    keeps_history = all(
        prompts[later].startswith(rendered_answers[index].rstrip())
        for index in answer_indices
        for later in answer_indices
        if later > index
    )
    faults = [
        *([] if begins_with_prompt else ["rewrites the answer"]),
        *([] if keeps_history else ["rewrites history"]),
    ]
    return " and ".join(faults)


def history_notice(faults: Mapping[str, str], history: str) -> str:
    """Return the notice at a run's start: the effect of `rollout.history` with a template that changes earlier
    turns.
    """
    rewritten_kinds = {conversation_kind: fault for conversation_kind, fault in faults.items() if fault != REFUSES}
    refused_kinds = [conversation_kind for conversation_kind, fault in faults.items() if fault == REFUSES]
    refusal = f" It refuses: {'; '.join(refused_kinds)}." if refused_kinds else ""
    if not rewritten_kinds:
        return f"rollout.history = {history}: the chat template only appends, as sampled tokens require.{refusal}"
    changes = "; ".join(f"{conversation_kind}: {fault}" for conversation_kind, fault in rewritten_kinds.items())
    consequence = (
        "each rewritten history is a training sequence of its own"
        if history == "render"
        else "the policy sees the tokens as sampled, not the template's text; "
        "rollout.history=render follows the template"
    )
    return (
        f"rollout.history = {history}: the chat template rewrites earlier turns ({changes}), and {consequence}."
        f"{refusal}"
    )
