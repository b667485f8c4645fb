"""Deficit round robin: equal shares of tokens, and each tenant's own order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.service.queueing.fair_queue import FairQueue

COSTS = st.lists(st.integers(1, 300), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None)
@given(costs=st.dictionaries(st.sampled_from("abcd"), COSTS, min_size=2), quantum=st.integers(1, 100))
def test_tenants_with_waiting_items_take_equal_tokens(costs: dict[str, list[int]], quantum: int) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(quantum)
    for tenant, items in costs.items():
        for number, tokens in enumerate(items):
            queue.put(tenant, tokens, (tenant, number))
    largest = max(max(items) for items in costs.values())
    taken: Counter[str] = Counter()
    next_numbers = dict.fromkeys(costs, 0)
    for left in range(len(queue), 0, -1):
        assert len(queue) == left
        tenant, number = queue.pop()
        assert number == next_numbers[tenant], "a tenant's items leave in the order of their arrival"
        next_numbers[tenant] += 1
        taken[tenant] += costs[tenant][number]
        waiting = [taken[name] for name, items in costs.items() if next_numbers[name] < len(items)]
        assert max(waiting, default=0) - min(waiting, default=0) <= quantum + largest
    assert next_numbers == {name: len(items) for name, items in costs.items()}
    with pytest.raises(IndexError):
        queue.pop()


def test_small_calls_of_one_tenant_pass_the_large_ones_of_another() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for _ in range(3):
        queue.put("large", 10_000, "large")
    for _ in range(50):
        queue.put("small", 100, "small")
    order = [queue.pop() for _ in range(53)]
    assert order.index("large") >= 49, "100 small calls have the tokens of one large one"


def test_a_tenant_that_was_away_has_saved_no_tokens() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for _ in range(40):
        queue.put("steady", 10, "steady")
    assert [queue.pop() for _ in range(20)] == ["steady"] * 20
    for _ in range(20):
        queue.put("late", 10, "late")
    shares = Counter(queue.pop() for _ in range(20))
    assert abs(shares["late"] - shares["steady"]) <= 2


def test_unused_tokens_count_again() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for name in ("first", "second"):
        for _ in range(10):
            queue.put(name, 100, name)
    order = []
    for _ in range(10):
        order.append(queue.pop())
        if order[-1] == "first":
            # Each of its samples ended after half of its tokens.
            queue.refund("first", 50)
    assert Counter(order)["first"] in (6, 7)


def test_tokens_that_were_free_are_not_given_back() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for _ in range(40):
        queue.put("early", 100, "early")
    for _ in range(20):
        queue.pop()
    for _ in range(20):
        queue.put("late", 100, "late")
    for _ in range(20):
        queue.refund("early", 90)
    assert abs(Counter(queue.pop() for _ in range(20))["late"] - 10) <= 1
