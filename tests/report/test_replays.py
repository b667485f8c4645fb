"""Replays on a report: written by the command, read with care, shown as texts."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.report.replays import REPLAYS, replay_contents, write_replay

SAMPLE = {"prompt": 1, "attempt": 0, "reward": (0.5, 1.0), "advantage": (float("nan"), 2.0)}


def test_a_replay_is_read_as_texts(tmp_path: Path) -> None:
    write_replay(tmp_path, 3, ["step 3: bit-equal to its record"])
    write_replay(
        tmp_path, 4, ["step 4: equal"], ["algorithm.clip_high: 0.2 -> 0.3"], {"train/loss": (1.0, 1.0)}, [SAMPLE]
    )
    changed, plain = replay_contents(tmp_path)
    assert plain["lines"] == ["step 3: bit-equal to its record"] and not plain["rows"] and not plain["changes"]
    assert (changed["title"], changed["changes"]) == ("Step 4", ["algorithm.clip_high: 0.2 -> 0.3"])
    assert changed["metrics"] == [["train/loss", "1", "1"]]
    assert changed["columns"] == list(SAMPLE)
    assert changed["rows"] == [["1", "0", "0.5 → 1", "no number → 2"]]


def test_the_same_change_replaces_its_replay_and_another_one_is_added(tmp_path: Path) -> None:
    for change in ("a: 1 -> 2", "a: 1 -> 3", "a: 1 -> 2"):
        write_replay(tmp_path, 4, [change], [change])
    assert sorted(one["changes"] for one in replay_contents(tmp_path)) == [["a: 1 -> 2"], ["a: 1 -> 3"]]


def test_files_of_another_structure_are_left_out(tmp_path: Path) -> None:
    write_replay(tmp_path, 3, ["kept"])
    folder = tmp_path / REPLAYS
    (folder / "step_000001.json").write_text("{")
    (folder / "step_000002.json").write_text(json.dumps({"step": 2, "samples": [3]}))
    (folder / "step_000004.json").write_text("[]")
    text = (folder / "step_000003.json").read_text()
    (folder / "step_000006.json").write_text(text.replace('"step": 3', '"step": Infinity'))
    (folder / "step_000007.json").write_text("[" * 100_000)
    (folder / "step_000005.json").write_bytes(b"\xff\xfe")
    assert [one["lines"] for one in replay_contents(tmp_path)] == [["kept"]]
    assert replay_contents(tmp_path / "none") == []
