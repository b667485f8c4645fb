"""The ledger of prompts: what it proves, and what it finds wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarl.tracking.draws import LEDGER, DrawEvents, account, rewind
from megarl.tracking.run_folder import _remove_later_lines
from megarl.types import DataError

SIZES = {"sums": 3}


def ledger(run: Path, *steps: list[tuple[Any, ...]], num_open: int = 0, sizes: dict[str, int] = SIZES) -> Path:
    """Write a ledger with the events of each step. `num_open` is the count of the last step."""
    events, file = DrawEvents(), run / LEDGER
    for number, step in enumerate(steps, 1):
        for event in step:
            events.add(*event)
        events.write(file, number, sizes, num_open if number == len(steps) else 0, too_long=2)
    return file


def drawn(*indices: int, first: int = 0) -> list[tuple[Any, ...]]:
    return [("drawn", "sums", number, index) for number, index in enumerate(indices, first)]


def ended(kind: str, *indices: int) -> list[tuple[Any, ...]]:
    return [(kind, "sums", index) for index in indices]


def test_every_prompt_has_its_epoch_and_its_ending(tmp_path: Path) -> None:
    ledger(
        tmp_path,
        [*drawn(2, 0), *ended("used", 2)],
        [*drawn(1, 1, 0, first=2), *ended("filtered", 0), *ended("used", 1)],
        [("skipped", "sums", 2), *drawn(2, first=7), *ended("stale", 1), *ended("aborted", 0)],
        num_open=1,
    )
    found = account(tmp_path)
    assert found.faults == [] and (found.num_open, found.too_long, found.last_step) == (1, 2, 3)
    first, second, third = found.epochs
    assert first.is_complete and first.endings == {"used": 2, "filtered": 1} and first.num_open == 0
    # One prompt of the second epoch and one of the third were skipped by the curriculum.
    assert second.is_complete and (second.skipped, second.missing) == (1, 0)
    assert second.endings == {"stale": 1, "aborted": 1}
    assert not third.is_complete and (third.skipped, third.num_open) == (1, 1)


@pytest.mark.parametrize(
    ("steps", "num_open", "fault"),
    [
        pytest.param([drawn(2, 0, 0)], 3, "drawn more than once: 0", id="twice in an epoch"),
        pytest.param([drawn(2, 0, 0)], 3, "1 prompts were never drawn", id="never in an epoch"),
        pytest.param([[*drawn(2), *drawn(1, first=2)]], 2, "prompt 2 of its stream instead of 1", id="a gap"),
        pytest.param([[*drawn(2), *drawn(2)]], 2, "prompt 0 of its stream instead of 1", id="drawn again"),
        pytest.param([[*drawn(2), *ended("used", 2, 2)]], 0, "used more often than drawn", id="trained twice"),
        pytest.param([[*drawn(2), *ended("used", 1)]], 0, "prompt 1 of sums was used more often", id="never drawn"),
        pytest.param([drawn(2, 0)], 1, "2 prompts have no ending, but 1 groups are in flight", id="lost"),
    ],
)
def test_what_is_lost_or_doubled_is_named(tmp_path: Path, steps: Any, num_open: int, fault: str) -> None:
    ledger(tmp_path, *steps, num_open=num_open)
    assert any(fault in one for one in account(tmp_path).faults)


def test_a_lost_line_is_named(tmp_path: Path) -> None:
    file = ledger(tmp_path, drawn(2), drawn(0, first=1), drawn(1, first=2), num_open=3)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[2])
    assert "its line begins with event 2; 1 events were before" in account(tmp_path).faults[0]


def test_a_resume_cuts_the_ledger_to_the_state_of_its_checkpoint(tmp_path: Path) -> None:
    file = ledger(tmp_path, drawn(2), drawn(0, first=1), num_open=2)
    # Saved in the middle of step 2: one event was pending. The line of step 2 has a later one too.
    saved = json.loads(json.dumps(DrawEvents(1, [("drawn", "sums", 1, 0)]).as_json()))
    events = DrawEvents.from_json(saved)
    rewind(file, events.num_written)
    assert len(file.read_bytes().splitlines()) == 1
    events.add("drawn", "sums", 2, 1)
    events.write(file, 2, SIZES, 3, 0)
    found = account(tmp_path)
    assert found.faults == [] and found.epochs[0].draws == Counter([0, 1, 2]) and events.num_written == 3
    assert rewind(tmp_path / "no", 0) == 0


def test_a_ledger_that_was_cut_or_removed_is_noticed(tmp_path: Path) -> None:
    file = ledger(tmp_path, drawn(2), drawn(0, first=1), drawn(1, first=2), num_open=3)
    whole = file.read_bytes()
    num_events = sum(len(json.loads(line)["events"]) for line in whole.splitlines())
    assert rewind(file, num_events) == 0
    file.write_bytes(whole[: len(whole) // 2])
    assert rewind(file, num_events) > 0
    file.unlink()
    assert rewind(file, num_events) == num_events


def test_the_line_of_a_large_batch_is_kept_on_resume(tmp_path: Path) -> None:
    """A batch of 16,384 prompts has more than 65,536 values."""
    events = DrawEvents()
    for number in range(16_384):
        events.add("drawn", "sums", number, number)
        events.add("used", "sums", number)
    events.write(tmp_path / "draws.jsonl", 1, {"sums": 16_384}, 0, 0)
    content = (tmp_path / "draws.jsonl").read_bytes()
    assert _remove_later_lines(tmp_path / "draws.jsonl", 1) == [1.0]
    assert (tmp_path / "draws.jsonl").read_bytes() == content
    assert account(tmp_path).faults == []


@pytest.mark.parametrize(
    "line",
    [
        b"[]", b"{", b"[" * 100_000, b"\xff", b'{"step": 1}',
        b'{"step":1,"first":0,"sizes":{"s":0},"open":0,"too_long":0,"events":[["drawn","s",0,0]]}',
        b'{"step":1,"first":0,"sizes":{"s":1},"open":0,"too_long":0,"events":[["skipped","s",1e30]]}',
        b'{"step":1,"first":0,"sizes":{"s":1},"open":0,"too_long":0,"events":[["skipped","s",99999999999]]}',
        b'{"step":1,"first":0,"sizes":{"s":1},"open":0,"too_long":0,"events":[["burnt","s",0]]}',
    ],
)  # fmt: skip
def test_a_damaged_line_is_refused_and_one_cut_short_is_left_out(tmp_path: Path, line: bytes) -> None:
    file = ledger(tmp_path, drawn(2), num_open=1)
    whole = file.read_bytes()
    file.write_bytes(whole + line)
    assert account(tmp_path).faults == []
    file.write_bytes(whole + line + b"\n")
    with pytest.raises(DataError, match=rf"{LEDGER}:2: the line is not one of a ledger"):
        account(tmp_path)


def test_a_run_without_a_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no ledger"):
        account(tmp_path)
