"""Deficit round robin (Shreedhar and Varghese, 1995): tenants get equal shares of work, counted in tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(eq=False, slots=True)
class _Backlog(Generic[Item]):
    """A tenant's waiting items with their tokens, oldest first, and `deficit`, its tokens left in this turn."""

    items: deque[tuple[int, Item]] = field(default_factory=deque)
    deficit: int = 0
    paid: int = 0
    """Tokens taken while other tenants waited, less refunds."""


class FairQueue(Generic[Item]):
    """A queue of several tenants' items. The items of one tenant leave in the order of their arrival.

    While two tenants have items waiting, the tokens taken by them differ by at most `quantum` plus the largest item.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._backlogs: dict[Hashable, _Backlog[Item]] = {}
        self._tenants_in_turn: deque[Hashable] = deque()
        """Tenants with waiting items, in the order of their turns. The first one's turn has begun."""

    def __len__(self) -> int:
        return sum(len(backlog.items) for backlog in self._backlogs.values())

    def put(self, tenant: Hashable, tokens: int, item: Item) -> None:
        if tenant not in self._backlogs:
            self._backlogs[tenant] = _Backlog()
            self._tenants_in_turn.append(tenant)
        self._backlogs[tenant].items.append((tokens, item))

    def pop(self) -> Item:
        """Remove and return the next item. Raises IndexError if there is none.

        At the start of its turn a tenant gets `quantum` tokens (its deficit). The turn lasts while the deficit pays for
        its first waiting item.
        """
        if not self._tenants_in_turn:
            raise IndexError("no item is waiting")
        self._skip_rounds()
        while True:
            tenant = self._tenants_in_turn[0]
            backlog = self._backlogs[tenant]
            tokens, item = backlog.items[0]
            if tokens <= backlog.deficit:
                break
            # The turn ends. Its unused tokens count in the tenant's next turn.
            self._tenants_in_turn.rotate(-1)
            self._backlogs[self._tenants_in_turn[0]].deficit += self._quantum
        backlog.items.popleft()
        backlog.deficit -= tokens
        if len(self._tenants_in_turn) > 1:
            backlog.paid += tokens
        if not backlog.items:
            # A tenant without work saves no tokens: it could later keep the others waiting.
            del self._backlogs[tenant]
            self._tenants_in_turn.popleft()
            if self._tenants_in_turn:
                self._backlogs[self._tenants_in_turn[0]].deficit += self._quantum
        return item

    def refund(self, tenant: Hashable, tokens: int) -> None:
        """Return unused `tokens` of a popped item to its tenant, if it has waiting items.

        Refunds only tokens paid while other tenants waited. Otherwise a tenant that was alone would save up tokens, and
        later keep the others waiting.
        """
        if (backlog := self._backlogs.get(tenant)) is not None:
            refunded_tokens = min(tokens, backlog.paid)
            backlog.paid -= refunded_tokens
            backlog.deficit += refunded_tokens

    def _skip_rounds(self) -> None:
        """Add at once the quanta of all rounds in which no tenant could afford its first item."""
        # A tenant can pay for its first item after ceil((tokens - deficit) / quantum) turns. All turns before are idle.
        num_idle_rounds = min(
            (backlog.items[0][0] - backlog.deficit - 1) // self._quantum for backlog in self._backlogs.values()
        )
        for backlog in self._backlogs.values():
            backlog.deficit += max(0, num_idle_rounds) * self._quantum
