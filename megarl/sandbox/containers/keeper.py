"""Keeper: one process per container. It sets up the container and serves its host's connection. The container ends with
it.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from megarl.processes.frames import send
from megarl.processes.process_tree import die_with, fork_child
from megarl.sandbox.containers import apptainer
from megarl.sandbox.containers.command_lines import CommandLineRuntime
from megarl.sandbox.containers.relay import Relay
from megarl.sandbox.containers.requests import DEFAULT_DISK_BYTES, Limits, RequestLoop, Runtime
from megarl.sandbox.containers.root_folder import (
    NAMESPACES,
    NETWORK_NAMESPACE,
    RELAY_PORT,
    RootFolder,
    complete_root_folder,
    drop_rights,
    map_users,
    open_loopback,
    open_user_namespace,
)
from megarl.sandbox.containers.runtimes import MachineRuntime, NamespaceRuntime
from megarl.sandbox.kernel import CLONE_NEWNS, clone, unshare
from megarl.sandbox.namespaces import become_user, unprivileged_users


def main() -> NoReturn:
    """Run the keeper. Command-line arguments: settings as JSON, and the descriptor of the connection.

    If the container outlives its host, the descriptor is a listening socket. Hosts then connect one after another.
    """
    settings, connection = json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    listener: socket.socket | None = None
    if settings["outlives_host"]:
        listener, (connection, _) = connection, connection.accept()
        listener.set_inheritable(False)
    # A program that inherited the connection could answer the host, and would keep it open after the keeper's end.
    connection.set_inheritable(False)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # If memory runs out, the kernel then kills programs before the training.
        file.write("1000")
    try:
        _KEEPERS_BY_KIND[settings["kind"]](settings, connection, listener)
    except OSError as error:
        send(connection, {"refused": error.strerror or str(error)})
    os._exit(0)


def _keep_machine_container(
    settings: dict[str, Any], connection: socket.socket, listener: socket.socket | None
) -> None:
    """Serve a container whose programs are plain processes of this machine, without isolation."""
    url, address = _address_url(settings["address"]), tuple(settings["address"])
    if listener is not None:
        # Programs reach the driver through the relay. Without a driver, it lets their connections wait.
        relay_listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        Relay(relay_listener, address, settings["lease_seconds"])
        url = _address_url(relay_listener.getsockname())
    _serve(settings, connection, listener, MachineRuntime(), url, os.getppid())


def _keep_command_line_container(
    settings: dict[str, Any], connection: socket.socket, listener: socket.socket | None
) -> None:
    runtime = CommandLineRuntime(settings)
    try:
        if settings["network"] == "endpoint":
            Relay(runtime.listen(), tuple(settings["address"]), _relay_patience(settings))
        _serve(settings, connection, listener, runtime, _endpoint_url(settings), os.getppid())
    finally:
        runtime.close()


def _keep_apptainer_container(
    settings: dict[str, Any], connection: socket.socket, listener: socket.socket | None
) -> None:
    """Keep a container of apptainer in new namespaces, and relay its connections until its first process ends."""
    is_isolated, supervisor = settings["network"] == "endpoint", os.getppid()

    def serve(start_runtime: Callable[[], Runtime]) -> None:
        """Start the container, then answer the host's requests. Called in the container's first process.

        `start_runtime` starts it, and returns the `Runtime` of its programs. A failed start is reported to the host.
        """
        try:
            _bind_to_cpus(settings["limits"]["cpus"])
            runtime = start_runtime()
        except OSError as error:
            send(connection, {"refused": error.strerror or str(error)})
            return
        _serve(settings, connection, listener, runtime, _endpoint_url(settings), supervisor)

    first_process, relay_listener = apptainer.start_in_namespaces(
        settings, serve, is_isolated=is_isolated, disk_bytes=_disk_bytes(settings)
    )
    _close_connections(connection, listener)
    if relay_listener is not None:
        Relay(relay_listener, tuple(settings["address"]), _relay_patience(settings))
    _wait_for_end(first_process)


def _serve(
    settings: dict[str, Any],
    connection: socket.socket,
    listener: socket.socket | None,
    runtime: Runtime,
    url: str,
    supervisor: int,
) -> None:
    greeting_fields = {"url": url, "supervisor": supervisor}
    limits = Limits(**settings["limits"])
    RequestLoop(connection, runtime, limits, settings["lease_seconds"], facts=greeting_fields, listener=listener).run()


def _relay_patience(settings: dict[str, Any]) -> float:
    return settings["lease_seconds"] if settings["outlives_host"] else 0.0


def _endpoint_url(settings: dict[str, Any]) -> str:
    """Return the endpoint's URL for programs of a container: a relay's if the container has a network of its own."""
    return f"http://127.0.0.1:{RELAY_PORT}" if settings["network"] == "endpoint" else _address_url(settings["address"])


def _disk_bytes(settings: dict[str, Any]) -> int:
    return settings["limits"]["disk_bytes"] or DEFAULT_DISK_BYTES


def _keep_namespace_container(
    settings: dict[str, Any], connection: socket.socket, listener: socket.socket | None
) -> None:
    """Create a container's namespaces, and relay its connections until its first process ends."""
    supervisor, is_root = os.getppid(), os.geteuid() == 0
    root = RootFolder(
        image=settings["image"],
        folders=tuple(settings["folders"]),
        python=tuple(settings["python"]),
        disk_bytes=_disk_bytes(settings),
    )
    # Open /proc first: user maps can be written only in the machine's /proc, and the new root has none.
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if is_root:
        _build_root_as_other_user(root, proc)
        # The kernel forgets the death signal when the user changes, so set it again.
        die_with(supervisor)
    user, group = os.geteuid(), os.getegid()
    is_isolated = settings["network"] == "endpoint"
    own_end, child_end = socket.socketpair()

    def run_first_process() -> None:
        """In the new namespaces: complete the container's root, give up all rights, then answer requests."""
        own_end.close()
        try:
            map_users(proc, user=user, group=group)
            os.close(proc)
            if not is_root:
                root.build()
            complete_root_folder()
            _bind_to_cpus(settings["limits"]["cpus"])
            # A socket stays in the network where it was opened, whichever process accepts on it.
            if is_isolated:
                with open_loopback() as relay_listener:
                    socket.send_fds(child_end, [b"listening"], [relay_listener.fileno()])
            child_end.close()
            drop_rights()
        except OSError as error:
            send(connection, {"refused": error.strerror or str(error)})
            return
        _serve(settings, connection, listener, NamespaceRuntime(), _endpoint_url(settings), supervisor)

    first_process = fork_child(run_first_process, lambda: clone(NAMESPACES | (NETWORK_NAMESPACE if is_isolated else 0)))
    os.close(proc)
    # If this end stayed open, `recv_fds` would never return for a child without a listener.
    child_end.close()
    _close_connections(connection, listener)
    # No listener: the container uses the machine's network, or did not start.
    _, listeners, _, _ = socket.recv_fds(own_end, 16, 1)
    if listeners:
        Relay(socket.socket(fileno=listeners[0]), tuple(settings["address"]), _relay_patience(settings))
    _wait_for_end(first_process)


_KEEPERS_BY_KIND = {
    "process": _keep_machine_container,
    "sandbox": _keep_namespace_container,
    "podman": _keep_command_line_container,
    "docker": _keep_command_line_container,
    "apptainer": _keep_apptainer_container,
}
"""Functions that keep a container running, by the value of `rollout.agent.sandbox`."""


def _build_root_as_other_user(root: RootFolder, proc: int) -> None:
    """Build a container's root folder, then drop root's rights. `proc`: descriptor of /proc."""
    # Build with root's rights, because perhaps only root can read the folders. The container's programs lose them.
    # Choose the user first, because the mounts' owners are mapped to this user.
    user = _find_unprivileged_user(proc)
    user_namespace = open_user_namespace(user, proc)
    unshare(CLONE_NEWNS)
    root.build(user_namespace)
    os.close(user_namespace)
    become_user(user)


def _wait_for_end(first_process: int) -> NoReturn:
    """Wait until a container's first process ends, then end the keeper. A relay works in threads meanwhile."""
    select.select([os.pidfd_open(first_process)], [], [])
    os._exit(0)


def _close_connections(connection: socket.socket, listener: socket.socket | None) -> None:
    """Close this process's copies: the host notices the container's end only if no other process has one."""
    connection.close()
    if listener is not None:
        listener.close()


def _find_unprivileged_user(proc: int) -> int:
    """Return the id of a user without rights in this process's user namespace. Raises PermissionError without one."""
    with os.fdopen(os.open("self/uid_map", os.O_RDONLY, dir_fd=proc)) as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    for user in unprivileged_users():
        # Root of a rootless container can become only a user mapped into it.
        if any(first_user <= user < first_user + num_users for first_user, _, num_users in ranges):
            return user
    raise PermissionError("setresuid: this process cannot change to an unprivileged user")


def _bind_to_cpus(cpu_limit: float | None) -> None:
    """Restrict this process and its children to `cpu_limit` CPUs, rounded up. Raises OSError for a smaller machine."""
    if cpu_limit is None:
        return
    num_cpus = math.ceil(cpu_limit)
    cpus = sorted(os.sched_getaffinity(0))
    if num_cpus > len(cpus):
        raise OSError(f"the task needs {num_cpus} CPUs, and this machine has {len(cpus)}")
    # At random, so that the containers share the node's CPUs evenly.
    os.sched_setaffinity(0, random.sample(cpus, num_cpus))


def _address_url(address: tuple[str, int]) -> str:
    host, port = address
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
