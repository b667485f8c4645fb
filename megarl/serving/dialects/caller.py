"""Identification of the calling agent by the headers of its client."""

from __future__ import annotations

import json
from collections.abc import Mapping

from megarl.types import MAIN_AGENT, Caller

_MAX_CHARACTERS = 128
"""Maximum characters of a name. Clients send names, and each call stores them."""
_MAX_METADATA = 4096
"""Maximum characters of the header with Codex's metadata."""


def read_caller(headers: Mapping[str, str]) -> Caller:
    """Return the agent named by megarl's headers `x-megarl-agent`, `-parent` and `-kind`; else the main agent."""
    return _make_caller(headers, None, None, None)


def read_claude_code_caller(headers: Mapping[str, str]) -> Caller:
    """Return the agent named by Claude Code's headers. Claude Code sends no id for its main agent."""
    agent = headers.get("x-claude-code-agent-id")
    return _make_caller(headers, agent, headers.get("x-claude-code-parent-agent-id"), None)


def read_codex_caller(headers: Mapping[str, str]) -> Caller:
    """Return the thread named by Codex's headers. Codex's main thread has an id, but no parent."""
    parent = headers.get("x-codex-parent-thread-id")
    agent = headers.get("thread-id") if parent else None
    return _make_caller(headers, agent, parent, _read_request_kind(headers.get("x-codex-turn-metadata", "")))


def _make_caller(headers: Mapping[str, str], agent: str | None, parent: str | None, kind: str | None) -> Caller:
    """Return the agent that a request names. megarl's headers take precedence over a vendor's values."""
    agent = _valid_name(headers.get("x-megarl-agent")) or _valid_name(agent)
    parent = _valid_name(headers.get("x-megarl-parent")) or _valid_name(parent)
    kind = _valid_name(headers.get("x-megarl-kind")) or _valid_name(kind)
    # A parent without an agent identifies nobody.
    return Caller(agent, parent or MAIN_AGENT, kind) if agent else Caller(kind=kind)


def _valid_name(text: str | None) -> str:
    return "".join(character for character in (text or "")[:_MAX_CHARACTERS] if character.isprintable()).strip()


def _read_request_kind(metadata: str) -> str | None:
    """Return the kind of a request from Codex's metadata, such as `turn` or `compaction`; None: it has none."""
    if len(metadata) > _MAX_METADATA:
        return None
    try:
        values = json.loads(metadata)
    except (ValueError, RecursionError):
        return None
    kind = values.get("request_kind") if isinstance(values, dict) else None
    return kind if isinstance(kind, str) else None
