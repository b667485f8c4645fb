"""The numbers of a GPU in README and tests/gpu/README.md: medians and ranges of recorded runs, never a best value."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools/bench/results"
QUOTED = re.compile(r"([\d.,]*\d)(?: [^\d()|]*)?\(([\d.,]*\d) to ([\d.,]*\d)[;)]")
"""A median with its unit, and its range: `14.2 s (12.8 to 15.8)`."""
SCALES = (1.0, 1e3, 100.0)
"""Factors from a recorded number to the quoted one: none, to milliseconds, to percent."""


def is_rounded(text: str, number: float) -> bool:
    """Whether a text is a number rounded to the text's digits. Final zeros of whole numbers may be rounded too."""
    digits = text.replace(",", "")
    _, point, decimals = digits.partition(".")
    exponent = -len(decimals) if point else len(digits) - len(digits.rstrip("0"))
    return abs(float(digits) - number) <= 0.5001 * 10**exponent


def recorded_metrics() -> list[dict[str, Any]]:
    lines = [json.loads(line) for file in RESULTS.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [line for line in lines if "metric" in line]


def sources(quote: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Return the recorded metrics whose median, lowest and highest value are those of a quote."""

    def is_source(spread: list[float]) -> bool:
        numbers = (statistics.median(spread), min(spread), max(spread))
        return any(all(is_rounded(text, scale * n) for text, n in zip(quote, numbers, strict=True)) for scale in SCALES)

    return [line for line in recorded_metrics() if is_source(line["spread"])]


def section(page: str, title: str) -> str:
    """Return the text of one section of a page."""
    text = (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert text, f"{page} has no section {title}"
    return text


@pytest.mark.parametrize(("page", "title"), [("README.md", "Status"), ("tests/gpu/README.md", "What has run")])
def test_each_quoted_number_is_the_median_of_a_recorded_run(page: str, title: str) -> None:
    quotes = [match.groups() for match in QUOTED.finditer(section(page, title))]
    assert len(quotes) >= 7, f"{page}: the form of the numbers has changed"
    assert [quote for quote in quotes if not sources(quote)] == []


def test_each_number_of_readme_names_its_command() -> None:
    command, count = "", 0
    for row in section("README.md", "Status").splitlines():
        quotes = [match.groups() for match in QUOTED.finditer(row)] if row.startswith("|") else []
        if not quotes:
            continue
        cell = row.strip("| ").split("|")[-1].strip()
        if cell != "the same":
            command = re.findall(r"`([^`]+)`", cell)[0]
        for quote in quotes:
            assert any(command in line["command"] for line in sources(quote)), f"{quote}: not by {command}"
        count += len(quotes)
    assert count >= 7


@pytest.mark.parametrize("quote", [("12.8", "12.8", "15.8"), ("498", "487", "498"), ("13", "12.8", "15.8")])
def test_a_best_value_has_no_source(quote: tuple[str, str, str]) -> None:
    assert sources(quote) == []
