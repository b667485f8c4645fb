"""Marks between which models write their thoughts, and whether a completion ends before its thoughts do."""

from __future__ import annotations

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Openings and closings: most families, Mistral, Seed-OSS."""
_CHANNEL = "<|channel|>"
"""Start of a channel's name in gpt-oss (Harmony). Thoughts are the channel `analysis`."""
ALL_MARKS = (*(mark for pair in MARKS for mark in pair), _CHANNEL)


def ends_in_thoughts(text: str, *, begins_in_thoughts: bool = False) -> bool:
    """Return whether a completion ended, or was cut, inside its thoughts, so that it has no answer.

    `begins_in_thoughts`: the prompt opens the thoughts, as some chat templates do.
    """
    last_opening = max(text.rfind(opening) for opening, _ in MARKS)
    last_closing = max(text.rfind(closing) for _, closing in MARKS)
    channel_start = text.rfind(_CHANNEL)
    if channel_start > max(last_opening, last_closing):
        return text.startswith("analysis", channel_start + len(_CHANNEL))
    return last_opening > last_closing if max(last_opening, last_closing) >= 0 else begins_in_thoughts


def without_thoughts(text: str) -> str:
    """Return the text after its last closed thoughts, or from its last channel on; else all of it."""
    ends = [text.rfind(closing) + len(closing) for _, closing in MARKS if closing in text]
    return text[max(*ends, text.rfind(_CHANNEL), 0) :]
