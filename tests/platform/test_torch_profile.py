"""A step profiled by torch: the trace has the operators within ranges named as the spans."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megarl.platform import spans
from megarl.platform.torch_profile import TorchProfile
from megarl.types import ConfigError


def test_a_trace_has_operators_within_named_ranges(tmp_path: Path) -> None:
    profile = TorchProfile(["torch"])
    profile.start()
    with spans.annotation("phase train"), spans.span("policy.update"):
        product = torch.ones(64, 64) @ torch.ones(64, 64)
    assert product[0, 0] == 64
    folder = tmp_path / "step_000002"
    assert profile.stop(folder, 3) == ["rank_3.json.gz"]
    with gzip.open(folder / "rank_3.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    timed = {event["name"]: event for event in events if event.get("ph") == "X"}
    begins = [timed[name]["ts"] for name in ("phase train", "policy.update", "aten::mm")]
    ends = [timed[name]["ts"] + timed[name]["dur"] for name in ("aten::mm", "policy.update", "phase train")]
    assert begins == sorted(begins) and ends == sorted(ends)
    # Without a profile neither is anything else than before.
    assert spans.span("later") is spans.annotation("later")


def test_spans_are_recorded_and_annotated_at_once(tmp_path: Path) -> None:
    profile = TorchProfile(["torch"])
    profile.start()
    spans.record(True)
    with spans.span("forward"):
        torch.ones(2).sum()
    [(name, began, ended)] = spans.record(False)
    profile.stop(tmp_path, 0)
    assert name == "forward" and began < ended
    assert b'"forward"' in gzip.decompress((tmp_path / "rank_0.json.gz").read_bytes())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_memory_of_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^train\.profile_with = memory: .*leave out memory"):
        TorchProfile(["torch", "memory"])
