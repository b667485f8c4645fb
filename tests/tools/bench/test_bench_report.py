"""The lines that benchmarks print."""

from __future__ import annotations

import pytest

from tools.bench.parts import report


@pytest.mark.parametrize(
    ("target", "met"),
    [(">= 2", True), (">= 2.1", False), ("< 2", False), ("<= 2.0", True), ("== 2", True), (None, None)],
)
def test_a_line_judges_the_median(target, met):
    line = report.metric_line(
        "speed",
        [3.0, 1.0, 2.0],
        "x",
        target=target,
        against="y",
        machine={"cores": 2},
        versions={"torch": "1"},
        case="z",
    )
    assert (line["value"], line["met"], line["spread"], line["case"]) == (2.0, met, [1.0, 2.0, 3.0], "z")


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="target 'about 2' must be one of"):
        report.metric_line("speed", [1.0], "x", target="about 2", against="y", machine={}, versions={})


def test_the_machine_is_described():
    assert report.machine().keys() == {"processor", "cores", "memory_bytes", "gpu", "load"}
    assert report.machine()["memory_bytes"] > report.available_bytes() > 0
    assert report.versions("no-such-package").keys() == {"megarl", "torch"}
