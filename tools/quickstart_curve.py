"""Draw the accuracy of a run over its steps as an SVG: the README's picture of the quickstart.

python tools/quickstart_curve.py runs/quickstart --out launch/quickstart.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import megarl

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 40, 44
# White behind the curve, because a page may be dark.
HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"
  font-family="sans-serif" font-size="12">
<title>Accuracy of the quickstart over its GRPO steps</title>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>"""

Point = tuple[float, float]


def points(run: Path, metric: str) -> list[Point]:
    """Return (step, value) of a metric, for each step of a run that has it."""
    table = megarl.load_run(run).metrics().select(["step", metric]).drop_null()
    return [(row["step"], row[metric]) for row in table.to_pylist()]


def picture(training: Sequence[Point], heldout: Sequence[Point]) -> str:
    """Return an SVG: the accuracy of training samples as a line, the held-out accuracy as a line with dots."""
    last = int(max(step for step, _ in [*training, *heldout]))

    def place(point: Point) -> Point:
        step, value = point
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)
        return round(x, 1), round(y, 1)

    parts = [HEAD]
    for value in (0, 0.25, 0.5, 0.75, 1):
        (left, y), (right, _) = place((0, value)), place((last, value))
        parts.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for step in range(0, last + 1, max(1, last // 4)):
        x, y = place((step, 0))
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{step}</text>')
    parts += [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">GRPO step</text>',
        f'<polyline points="{_join_points(map(place, training))}" fill="none" stroke="#f0a040" stroke-width="1.5"/>',
        f'<polyline points="{_join_points(map(place, heldout))}" fill="none" stroke="#2060c0" stroke-width="2"/>',
    ]
    for point in heldout:
        x, y = place(point)
        # The label of the first dot stands below the rising curve, that of the last one within the picture.
        shift, anchor = (8, "start") if point is heldout[0] else (0, "end" if point is heldout[-1] else "middle")
        above = -14 if point is heldout[0] else 9
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#2060c0"/>')
        parts.append(
            f'<text x="{x + shift}" y="{y - above}" text-anchor="{anchor}" fill="#2060c0">{point[1]:.3f}</text>'
        )
    parts += [
        f'<text x="{LEFT}" y="18" fill="#2060c0">held-out accuracy, greedy</text>',
        f'<text x="{LEFT + 180}" y="18" fill="#c07010">accuracy of training samples, temperature 1</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def _join_points(placed: Iterable[Point]) -> str:
    return " ".join(f"{x},{y}" for x, y in placed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    training = points(arguments.run, "reward/accuracy")
    heldout = points(arguments.run, "val/heldout/accuracy")
    arguments.out.write_text(picture(training, heldout), encoding="utf-8")


if __name__ == "__main__":
    main()
