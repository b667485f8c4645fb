"""Host of one node's containers: starts them, passes on requests, renews leases, and ends them.

The host runs in the driver, or in another node's agent process. Requests and answers are JSON values, so that both are
called in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from megarl.files.pid_space import boot_id
from megarl.platform.memory.host_memory import available_bytes, machine_bytes
from megarl.sandbox.containers.container import Container, ContainerError, ContainerSettings, Executed
from megarl.sandbox.containers.requests import Limits


class ContainerHost:
    """The containers of this node, by name."""

    def __init__(self) -> None:
        self._containers: dict[str, Container] = {}
        self._start_tasks: dict[str, asyncio.Task[Any]] = {}
        """Tasks that start or adopt a container, by its name."""
        self._program_tasks: dict[str, asyncio.Task[Any]] = {}
        """Tasks that run a program, by the name of its container."""

    async def request(self, verb: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a request. After a failure the answer has `error`, as `KIND: reason`."""
        try:
            return await getattr(self, f"_{verb}")(**fields)
        except ContainerError as error:
            return {"error": str(error)}

    async def close(self) -> None:
        containers, self._containers = self._containers, {}
        await asyncio.gather(*(container.disconnect() for container in containers.values()))

    async def _start(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        container = Container(_read_settings(settings))
        await self._start_and_store(container, container.start())
        return {"url": container.url, "seconds": container.seconds_to_start}

    async def _adopt(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Take over an earlier host's container. `seconds_running` is 0 if no program runs."""
        container = Container(_read_settings(settings))
        await self._start_and_store(container, container.adopt())
        return {"url": container.url, "seconds": 0.0, "seconds_running": container.seconds_running}

    async def _end_earlier(self, name: str) -> dict[str, Any]:
        """End a container that an earlier host process started, unless it has ended."""
        # The name is enough to find it: the process that keeps the container has its settings.
        settings = ContainerSettings(kind="process", name=name, address=("", 0), outlives_host=True)
        container = Container(settings)
        with suppress(ContainerError):
            await container.adopt()
        # Stop an ended container too, to close the connection and remove the socket's file.
        await container.stop()
        return {}

    async def _start_and_store(self, container: Container, start_coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a container and store it. A stop request meanwhile cancels the start."""
        task = asyncio.current_task()
        assert task is not None, "requests are carried out in tasks"
        name = container.settings.name
        self._start_tasks[name] = task
        try:
            try:
                await start_coroutine
            finally:
                del self._start_tasks[name]
        # The container may already run, but `close` ends only the containers in `_containers`.
        except BaseException:
            await container.stop()
            raise
        self._containers[name] = container

    async def _execute(self, name: str, **fields: Any) -> dict[str, Any]:
        return await self._await_end(name, self._find(name).execute(**fields))

    async def _join(self, name: str, label: str) -> dict[str, Any]:
        return await self._await_end(name, self._find(name).join(label))

    async def _await_end(self, name: str, program_end: Coroutine[Any, Any, Executed]) -> dict[str, Any]:
        """Return a program's end as JSON values. A cancelled request, or the request `cancel`, ends the program."""
        program_task = asyncio.create_task(program_end)
        self._program_tasks[name] = program_task
        try:
            # `wait` does not raise the task's cancellation, so it differs from a cancellation of this request.
            await asyncio.wait({program_task})
        finally:
            program_task.cancel()
            del self._program_tasks[name]
        # `_cancel` cancelled the program; the host continues.
        if program_task.cancelled():
            raise ContainerError("Cancelled: the program was ended")
        return asdict(program_task.result())

    async def _cancel(self, name: str) -> dict[str, Any]:
        """End the program running in the container `name`, if any. The container continues."""
        if (program_task := self._program_tasks.get(name)) is not None:
            program_task.cancel()
        return {}

    async def _put(self, name: str, folder: str, files: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
        await self._find(name).put(folder, files)
        return {}

    async def _get(self, name: str, path: str, max_bytes: int) -> dict[str, Any]:
        return {"content": await self._find(name).get(path, max_bytes)}

    async def _stop(self, name: str) -> dict[str, Any]:
        """End a container, or its start."""
        # An agent on another node does not notice that the driver cancelled its start.
        if (start_task := self._start_tasks.get(name)) is not None:
            start_task.cancel()
            await asyncio.wait({start_task})
        # Remove it before the wait, so that a second stop and renewals skip it.
        if (container := self._containers.pop(name, None)) is not None:
            await container.stop()
        return {}

    async def _renew(self) -> dict[str, Any]:
        """Renew all leases. Returns living containers, the machine with its memory limit, and free memory."""
        for container in self._containers.values():
            container.renew()
        # Jobs and containers of one machine have separate memory limits, so the limit is part of its name.
        machine = f"{boot_id()} {machine_bytes()}"
        return {"names": [*self._containers], "machine": machine, "free_bytes": available_bytes()}

    def _find(self, name: str) -> Container:
        if name not in self._containers:
            raise ContainerError(f"ContainerLost: this node has no container {name}")
        return self._containers[name]


def _read_settings(settings: Mapping[str, Any]) -> ContainerSettings:
    limits = Limits(**settings["limits"])
    address = settings["address"][0], settings["address"][1]
    arguments = {**settings, "limits": limits, "folders": tuple(settings["folders"]), "address": address}
    return ContainerSettings(**arguments)
