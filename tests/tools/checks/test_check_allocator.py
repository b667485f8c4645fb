"""The simulation of torch's allocator: its rules by hand, and the check at its small size."""

from __future__ import annotations

import pytest

from tools import check
from tools.checks import allocator
from tools.checks.allocator import GIB, MIB, Allocator


def test_ordinary_segments_follow_the_rules_of_torch() -> None:
    """Sizes from c10/cuda/CUDACachingAllocator.cpp of torch 2.13."""
    found = Allocator(is_expandable=False)
    small = [found.allocate(size) for size in (1, 512, 513)]
    assert found.reserved == 2 * MIB and [block.start for block in small] == [0, 512, 1024]
    middle = found.allocate(3 * MIB)
    assert found.reserved == 22 * MIB and middle.next is not None and middle.next.size == 17 * MIB
    large = found.allocate(11 * MIB - 1)
    assert large.next is not None and large.next.kind == "free", "the rest of the segment of 20 MiB was enough"
    whole = found.allocate(30 * MIB + 1)
    # 2 MiB less one byte remain above the request, so they are split off.
    assert found.reserved == (22 + 32) * MIB and whole.size == 30 * MIB + 512
    odd = found.allocate(63 * MIB)
    assert odd.size == 64 * MIB and odd.next is None, "a rest of up to 1 MiB is not split off"
    for block in (*small, middle, large, whole, odd):
        found.free(block)
    assert found.requested == 0 and found.reserved == (22 + 32 + 64) * MIB
    found.empty_cache()
    assert found.reserved == 0


def test_a_segment_between_two_used_ones_is_not_joined_with_them() -> None:
    """The ordinary allocator cannot serve 64 MiB from two free segments of 32; an expandable segment can."""
    taken = {}
    for is_expandable in (False, True):
        found = Allocator(is_expandable)
        for block in [found.allocate(32 * MIB) for _ in range(2)]:
            found.free(block)
        found.allocate(64 * MIB)
        taken[is_expandable] = found.reserved // MIB
    # Memory is mapped 20 MiB at a time: 80 of them hold 64.
    assert taken == {False: 128, True: 80}


def test_an_expandable_segment_returns_memory_inside_and_takes_it_back() -> None:
    found = Allocator(is_expandable=True)
    blocks = [found.allocate(40 * MIB) for _ in range(3)]
    assert found.reserved == 120 * MIB
    found.free(blocks[1])
    found.empty_cache()
    assert found.reserved == 80 * MIB
    again = found.allocate(25 * MIB)
    assert again.start == 40 * MIB and found.reserved == 120 * MIB
    for block in (again, blocks[0], blocks[2]):
        found.free(block)
    found.empty_cache()
    assert found.reserved == 0 and found.most_reserved == 120 * MIB
    assert found.allocate(GIB).start == 0


def test_expandable_segments_leave_less_unused(capsys: pytest.CaptureFixture[str]) -> None:
    options = check.parse("allocator", check.load("allocator"), ["--size", "small"])
    ordinary, expandable, padded, both = allocator.run(options)
    assert ordinary["requested GiB"] == expandable["requested GiB"] < expandable["taken GiB"] < ordinary["taken GiB"]
    assert expandable["met"] and both["met"] and padded["more tokens"] > 0 == ordinary["more tokens"]
    # Padding is no help to expandable segments, and costs tokens.
    assert both["unused"] >= expandable["unused"] - 0.005
    with capsys.disabled():
        print([(row["segments"], row["rows padded to"], f"{row['unused']:.3f}") for row in (ordinary, expandable)])
