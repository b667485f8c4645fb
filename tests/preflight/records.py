"""A sound record of a data file."""

from __future__ import annotations

RECORD = {"messages": {"role": "user", "content": "1 + 2"}, "gt_answer": "3"}
