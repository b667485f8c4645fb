"""Chrome traces for Perfetto and chrome://tracing: time spans of several processes on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.platform.spans import Span


@dataclass(frozen=True, slots=True)
class Track:
    """Time spans of one process, nested or disjoint, in seconds on a time axis common to all tracks."""

    name: str
    spans: Sequence[Span]

    def shift(self, seconds: float) -> Track:
        return Track(self.name, [(name, start + seconds, end + seconds) for name, start, end in self.spans])


def chrome_trace(tracks: Sequence[Track], step_span: Span, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Chrome trace of all tracks, in microseconds. `step_span` is the enclosing span of the first track.

    `facts` are stored as `otherData`.
    """
    _, step_start, _ = step_span
    events: list[dict[str, Any]] = []
    for process, track in enumerate(tracks):
        spans = [step_span, *track.spans] if process == 0 else track.spans
        events += [
            {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": track.name}},
            {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}},
        ]
        events += [
            {
                "ph": "X",
                "name": name,
                "cat": track.name.split()[0],
                "pid": process,
                "tid": 0,
                "ts": round((start - step_start) * 1e6, 3),
                "dur": round((end - start) * 1e6, 3),
            }
            # At equal starts, longer spans come first, because the format nests spans in the order of events.
            for name, start, end in sorted(spans, key=lambda span: (span[1], -span[2]))
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(facts)}


def covered_share(tracks: Sequence[Track], step_span: Span) -> float:
    """Return the share of `step_span` during which any track has an open span."""
    _, step_start, step_end = step_span
    seconds, covered_until = 0.0, step_start
    for start, end in sorted((start, end) for track in tracks for _, start, end in track.spans):
        # Spans are sorted by start, so overlapping ones count once.
        start, end = max(start, covered_until), min(end, step_end)
        if end > start:
            seconds += end - start
            covered_until = end
    return seconds / (step_end - step_start)
