"""The bytes of a step through the driver: a few arrays of a token, whatever the ranks of a replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check
from tools.runs import read_lines


def test_bytes_do_not_grow_with_the_ranks_of_a_replica(tmp_path: Path) -> None:
    bytes_per_token = []
    for tp in ("1", "8"):
        rows_file = tmp_path / f"tp{tp}.jsonl"
        assert check.main(["driver_bytes", "--size", "small", "--tp", tp, "--json", str(rows_file)]) == 0
        rows = {row["call"]: row for row in read_lines(rows_file)}
        assert list(rows) == ["advance", "policy.forward", "policy.update", "all", "routed experts"]
        row = rows["all"]
        bytes_per_token.append(1e6 * (row["sent_mb"] + row["received_mb"]) / row["tokens"])
    # Token ids in and out twice, a mask, five arrays of float32 and two answers.
    assert 40 < bytes_per_token[0] < 70 and bytes_per_token[1] == pytest.approx(bytes_per_token[0], rel=0.05)
    assert check.main(["driver_bytes", "--size", "small", "--limit-gb", "0.001"]) == 1
