"""YAML files of others: a plain mapping, or nothing, without an error and without endless work."""

from __future__ import annotations

import pytest

from megarl.files.plain_yaml import MAX_BYTES, MAX_VALUES, read_mapping

BOMB = b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (n + 1, n + 1, n, n) for n in range(97, 121))


def test_a_mapping_is_read() -> None:
    assert read_mapping(b"name: a\ntrain: {steps: 3}\n1: x\n") == {"name": "a", "train": {"steps": 3}, "1": "x"}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[1]", b"a: [", b"\xff", b"\x00", b"[" * 5000, b"when: 2026-13-45", b"n: 0b_", b"? [a]\n: 1", b"<<: 1",
        b"a: !!python/object/apply:os.mkdir [x]", BOMB, b"a: " + b"x" * MAX_BYTES,
        b"a: [" + b"[]," * MAX_VALUES + b"]", b"a:\n" + b"-\n" * MAX_VALUES,
    ],
)  # fmt: skip
def test_what_is_not_a_plain_mapping_is_empty(content: bytes) -> None:
    assert read_mapping(content) == {}
