"""The runner of checks: its list, its sizes and its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import check
from tools.checks import allocator
from tools.runs import read_lines


def test_the_list_describes_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--list"]) == 0
    printed = capsys.readouterr().out
    listed = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert listed == check.NAMES and len(listed) == 20
    assert printed.count("    full: ") + printed.count("; full: ") == len(listed)


@pytest.mark.parametrize("name", check.NAMES)
def test_the_small_size_sets_options_that_the_check_has(name: str) -> None:
    module = check.load(name)
    required = {"same_weights": ["HEAD"], "lm_eval": ["model", "recipe"]}.get(name, [])
    full = vars(check.parse(name, module, required))
    assert module.SMALL.keys() <= full.keys() and bool(module.SMALL) == ("small" in module.DURATION)
    if module.SMALL:
        small = vars(check.parse(name, module, ["--size", "small", *required]))
        assert small == full | module.SMALL | {"size": "small"} and small != full | {"size": "small"}


@pytest.mark.parametrize(
    ("verdicts", "status"), [((True, None), 0), ((True, False), 1), ((), 1)], ids=["met", "one fails", "no rows"]
)
def test_a_check_fails_if_a_row_does(
    verdicts: tuple[bool | None, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rows(options: object) -> Iterator[dict[str, Any]]:
        for number, met in enumerate(verdicts):
            yield {"name": f"row {number}", "value": number / 3} | ({} if met is None else {"met": met})

    monkeypatch.setattr(allocator, "run", rows)
    file = tmp_path / "rows.jsonl"
    assert check.main(["allocator", "--json", str(file)]) == status
    printed = capsys.readouterr().out
    assert printed.count("ok\n") == verdicts.count(True) and printed.count("FAILS\n") == verdicts.count(False)
    if verdicts:
        assert [row["name"] for row in read_lines(file)] == ["row 0", "row 1"]
        assert printed.splitlines()[0].split() == ["name", "value"] and "0.3333" in printed
