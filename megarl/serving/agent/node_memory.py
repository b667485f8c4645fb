"""Memory of a run's machines for containers of agents."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from megarl.platform.memory.host_memory import available_bytes


@dataclass(slots=True, eq=False)
class MachineMemory:
    """Memory of one machine, in bytes, and the limits of its living containers."""

    free_bytes: int = field(default_factory=available_bytes)
    capacity_bytes: int | None = None
    """Memory for containers: the maximum of free memory over all renewals. None: not known yet."""
    reserved_bytes: dict[str, int] = field(default_factory=dict)
    """Limits of this driver's living containers by name; 0: no limit."""

    @property
    def bytes_per_container(self) -> float:
        """Free memory for each living container and one more. Young containers do not use their memory yet."""
        return self.free_bytes / (len(self.reserved_bytes) + 1)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the machine has memory for one more container with this limit."""
        # The first container always starts: a limit above the machine's memory must not stop the run.
        if not self.reserved_bytes or self.capacity_bytes is None:
            return True
        # Young containers do not use their memory yet, so their limits count.
        are_limits_met = sum(self.reserved_bytes.values()) + num_bytes <= self.capacity_bytes
        # Other programs on the machine may have grown.
        return are_limits_met and num_bytes <= self.free_bytes

    def record_free_bytes(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        if self.capacity_bytes is None:
            self.capacity_bytes = free_bytes + sum(self.reserved_bytes.values())
        # Containers of an earlier driver used memory at the first renewal, and end later.
        self.capacity_bytes = max(self.capacity_bytes, free_bytes)


class RunMemory:
    """Memory of all machines of a run.

    Nodes on the same machine with the same memory limit share an account, for example the driver and its agent.
    """

    def __init__(self) -> None:
        self._accounts: list[MachineMemory] = []
        self._by_machine: dict[str, MachineMemory] = {}
        self._changed = asyncio.Condition()

    def open_account(self) -> MachineMemory:
        """Return an account for a node whose machine is not known yet."""
        self._accounts.append(account := MachineMemory())
        return account

    def account_of(self, machine: str, account: MachineMemory) -> MachineMemory:
        """Return the account of `machine`. Containers in the node's own `account` move to it."""
        machine_account = self._by_machine.setdefault(machine, account)
        if machine_account is not account:
            machine_account.reserved_bytes |= account.reserved_bytes
            self._accounts.remove(account)
        return machine_account

    @property
    def num_containers(self) -> int:
        return sum(len(account.reserved_bytes) for account in self._accounts)

    async def wait_for_change(self) -> None:
        async with self._changed:
            await self._changed.wait()

    async def notify_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()
