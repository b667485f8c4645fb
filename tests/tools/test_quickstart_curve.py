"""The README's picture is drawn from a run's metrics."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools.quickstart_curve import main

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def test_the_curve_shows_each_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        {"step": 0, "val/heldout/accuracy": 0.25},
        {"step": 1, "reward/accuracy": 0.5},
        {"step": 2, "reward/accuracy": 1.0, "val/heldout/accuracy": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    monkeypatch.setattr("sys.argv", ["quickstart_curve.py", str(tmp_path), "--out", str(tmp_path / "curve.svg")])
    main()
    drawn = ElementTree.parse(tmp_path / "curve.svg").getroot()
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"0.250", "0.750"} <= set(texts)
    training, heldout = (
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in drawn.iter(f"{SVG}polyline")
    )
    # The plot is 564 wide and 216 high, from (56, 40).
    assert heldout == [(56.0, 202.0), (620.0, 94.0)]
    assert training == [(338.0, 148.0), (620.0, 40.0)]


def test_the_picture_shows_the_table_of_the_readme() -> None:
    drawn = ElementTree.parse(ROOT / "launch/quickstart.svg").getroot()
    labels = [text.text or "" for text in drawn.iter(f"{SVG}text")]
    accuracies = [label for label in labels if label.startswith("0.") and len(label) == 5]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(accuracies) > 2
    assert f"{accuracies[0]}       {accuracies[-1]}" in readme
