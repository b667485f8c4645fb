"""Messages between the driver and the agents of its nodes: headers, and the numbers with a meaning of their own.

The driver sends batches. A batch is one call on one node: parts, each a message with the processes that get it. The
agent returns the answers together once all have arrived, or a short time after the first one. So a rank that fails or
hangs does not hold up its neighbours' answers. Control messages to and from the agent itself are JSON.
"""

from __future__ import annotations

import json
import struct
from typing import Any

BATCH = struct.Struct("<I")
"""Header of a batch: the number of its parts, or `CONTROL`, or `NOTICE`."""
PART = struct.Struct("<IQ")
"""Header of a batch's part: the number of its processes, and the bytes of its message.

The numbers of the processes follow as uint32, then the message.
"""
ANSWER = struct.Struct("<IQ")
"""Header of an answer: the number of its process, or `AGENT`, and the bytes of its message. The message follows."""
LENGTH = struct.Struct("<Q")
"""Header of a control message to an agent: its length in bytes."""
CONTROL = 0xFFFFFFFF
"""Number of parts that announces a control message: `LENGTH`, then JSON for the agent itself."""
NOTICE = 0xFFFFFFFE
"""Number of parts that announces one part without an answer. A rank reads it even while it executes a call."""
AGENT = 0xFFFFFFFF
"""Number of a process that announces a control message of the agent itself, in JSON."""


def pack_control(message: dict[str, Any]) -> bytes:
    """Return a control message to an agent as bytes."""
    text = json.dumps(message).encode()
    return BATCH.pack(CONTROL) + LENGTH.pack(len(text)) + text


def pack_event(message: dict[str, Any]) -> bytes:
    """Return a control message of an agent to the driver as bytes."""
    text = json.dumps(message).encode()
    return ANSWER.pack(AGENT, len(text)) + text
