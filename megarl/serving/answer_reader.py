"""Converts a model call's sampled tokens to the answer for the agent."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megarl.data.tools.calls import ParsedTurn
from megarl.rollout.stitch import ModelCall
from megarl.serving.answers import Answer
from megarl.serving.codec import Codec
from megarl.serving.conversation import Conversation
from megarl.types import Caller, Completion


async def read_chat(
    codec: Codec,
    call_number: int,
    call: ModelCall,
    conversation: Conversation,
    stops: Sequence[str],
    caller: Caller,
    continued_number: int | None,
) -> Answer:
    """Return the answer to a conversation. `stops` are the request's stop strings."""
    # Parsed from tokens: special tokens mark reasoning and tool calls.
    decoded = await codec.parse_completion(call, conversation.tools, call_number)
    turn = decoded.turn
    return Answer(
        call_number,
        call,
        text=_cut_at_stop(turn.text, call.completion, stops),
        completion_text=decoded.full_text,
        is_in_thoughts=decoded.is_in_thoughts,
        prompt_messages=conversation.messages,
        reasoning=turn.reasoning,
        calls=_format_calls(turn),
        caller=caller,
        continued=continued_number,
    )


async def read_text(codec: Codec, call_number: int, call: ModelCall, stops: Sequence[str], caller: Caller) -> Answer:
    """Return the completion of a text. `stops` are the request's stop strings."""
    decoded = await codec.parse_completion(call, (), call_number)
    return Answer(
        call_number,
        call,
        text=_cut_at_stop(decoded.full_text, call.completion, stops),
        completion_text=decoded.full_text,
        is_in_thoughts=decoded.is_in_thoughts,
        caller=caller,
    )


def _format_calls(turn: ParsedTurn) -> tuple[tuple[str, str, str], ...]:
    """Return a turn's tool calls as (id, name, arguments). An invalid call has its error text as arguments."""
    return tuple(
        (
            call.id,
            call.name or "invalid_call",
            f"error: {call.error}" if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False),
        )
        for call in turn.calls
    )


def _cut_at_stop(text: str, completion: Completion, stops: Sequence[str]) -> str:
    """Return the text up to the first stop string, without it, as OpenAI does."""
    if completion.finish_reason != "stop":
        return text
    positions = [text.find(stop) for stop in stops]
    # Without a match the end-of-sequence token ended the text.
    matches = [position for position in positions if position >= 0]
    return text[: min(matches)] if matches else text
