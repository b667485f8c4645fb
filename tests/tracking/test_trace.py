"""Traces by spans that are typed in, and the recording of spans."""

from __future__ import annotations

import json

import pytest

from megarl.platform.spans import record, span
from megarl.tracking.trace import Track, chrome_trace, covered_share

WHOLE = ("step 7", 100.0, 110.0)


@pytest.mark.parametrize(
    ("tracks", "share"),
    [
        ([[]], 0.0),
        ([[("a", 100.0, 110.0)]], 1.0),
        ([[("a", 90.0, 102.0), ("b", 109.0, 120.0)]], 0.3),
        ([[("a", 101.0, 105.0), ("inner", 102.0, 103.0)], [("b", 104.0, 106.0)]], 0.5),
        ([[("late", 107.0, 108.0)], [("early", 100.0, 101.0)]], 0.2),
    ],
    ids=["nothing", "all of it", "beyond both ends", "nested and on two tracks", "in any order"],
)
def test_the_covered_share_is_that_of_the_union(tracks: list[list[tuple[str, float, float]]], share: float) -> None:
    rank_tracks = [Track(str(number), spans) for number, spans in enumerate(tracks)]
    assert covered_share(rank_tracks, WHOLE) == pytest.approx(share)


def test_a_trace_has_the_form_that_viewers_read() -> None:
    driver = Track("driver", [("inner", 101.5, 102.0), ("outer", 101.0, 103.0)])
    rank = Track("rank 0 on here", [("update", 1.25, 1.5)]).shift(100.0)
    trace = json.loads(json.dumps(chrome_trace([driver, rank], WHOLE, {"step": 7})))
    assert trace["otherData"] == {"step": 7} and trace["displayTimeUnit"] == "ms"
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["driver", "rank 0 on here"]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    # A span stands before those within it.
    assert [(e["name"], e["pid"], e["tid"], e["cat"], e["ts"], e["dur"]) for e in spans] == [
        ("step 7", 0, 0, "driver", 0.0, 10e6),
        ("outer", 0, 0, "driver", 1e6, 2e6),
        ("inner", 0, 0, "driver", 1.5e6, 0.5e6),
        ("update", 1, 0, "rank", 1.25e6, 0.25e6),
    ]


def test_spans_are_recorded_while_they_are_asked_for() -> None:
    with span("before"):
        pass
    assert record(True) == []
    with span("outer"):
        with span("inner"):
            pass
        with pytest.raises(ZeroDivisionError), span("failing"):
            raise ZeroDivisionError
    found = record(False)
    assert [name for name, _, _ in found] == ["inner", "failing", "outer"]
    (_, inner, inner_end), _, (_, outer, outer_end) = found
    assert outer <= inner <= inner_end <= outer_end
    with span("after"):
        pass
    assert record(False) == []
