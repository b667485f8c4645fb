"""The driver's record of the engines' slots for adapters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class EngineSlot:
    """A place for a LoRA adapter, with the same index in all engines.

    `version` names its adapter. None: an adapter without effect, so the base model answers.
    """

    index: int
    version: str | None = None
    is_used: bool = False
    """Whether `version` is loaded or being loaded."""
    num_users: int = 0
    """Sampling requests that use the version. Until they end it stays in the slot."""
    ready: asyncio.Future[None] | None = None
    """Done when the engines have loaded the version."""


class EngineSlots:
    """The slots in the order of their last use. A version without users may be replaced."""

    def __init__(self, count: int) -> None:
        self._slots = [EngineSlot(index) for index in range(count)]
        """Least recently used first."""

    def find(self, version: str | None) -> EngineSlot | None:
        """Return a version's slot, and mark it as used last; None: there is none."""
        slot = next((slot for slot in self._slots if slot.is_used and slot.version == version), None)
        if slot is not None:
            self._slots.remove(slot)
            self._slots.append(slot)
        return slot

    def find_unused(self) -> EngineSlot | None:
        """Return an empty slot, else the least recently used one without users, or None."""
        unused_slots = [slot for slot in self._slots if not slot.num_users]
        return min(unused_slots, key=lambda slot: slot.is_used, default=None)

    def assign(self, slot: EngineSlot, version: str | None, ready: asyncio.Future[None]) -> None:
        """Assign a slot to a version (None: the base model). `ready` completes when engines have loaded it."""
        slot.version, slot.is_used, slot.ready = version, True, ready
        # The list is ordered by the last use.
        self._slots.remove(slot)
        self._slots.append(slot)

    def clear(self, slot: EngineSlot) -> None:
        """Forget a slot's version. `ready` stays: requests that wait for it get the error of a failed load."""
        slot.version, slot.is_used = None, False
