"""A worker group inside a Slurm job: `srun` starts one task for each rank, which connects back to the driver.

The driver runs on the job's first node. Connections prove on both sides that they know a key (HMAC, the standard
library's), which lies in a file that only the user can read, in the run's folder on the shared file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path

from megarl.types import PeerLostError
from megarl.workers.process_group import ProcessGroup, Seat
from megarl.workers.rank import die_with, serve

_INTRODUCTION_SECONDS = 10


class _Task(Seat):
    """A task of the job step."""

    def __init__(self, rank: int, host: str, connected: socket.socket, log: Path, step: _Step) -> None:
        super().__init__(rank, log)
        self.host, self._step = host, step
        self.socket = connected
        self.socket.setblocking(False)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._step.end()

    def fate(self, is_dead: bool) -> str:
        return f"on node {self.host} ended or lost its connection"


class _Step:
    """The running srun. When it ends, all its tasks have."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.seats: list[Seat] = []
        self.ended = asyncio.create_task(self._wait())

    async def _wait(self) -> int:
        code = await self.process.wait()
        for seat in self.seats:
            seat.died.set_result(time.time())
        return code

    def end(self) -> None:
        """Have Slurm kill all tasks: what srun does when it is asked to terminate."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()


class SrunGroup(ProcessGroup):
    """The `WorkerGroup` of the tasks of a Slurm job. Make one with `start`, on the first node of the job.

    `options` are srun's besides.
    """

    async def _start_processes(self, log_folder: Path, environment: Mapping[str, str], timeout_seconds: float) -> None:
        key, key_file = secrets.token_bytes(32), log_folder.absolute() / f".key_{os.getpid()}"
        key_file.touch(mode=0o600)
        key_file.write_bytes(key)
        # Kept from others but not from rank 0, which is on this node too: bound, address reusable, not listening.
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("", 0))
        with socket.create_server(("", 0), backlog=self.world_size) as server:
            server.setblocking(False)
            address = [socket.gethostname(), str(server.getsockname()[1])]
            self._step = await self._srun(log_folder, environment, [*address, str(key_file)])
            try:
                await asyncio.wait_for(self._seat_all(server, key, log_folder), timeout_seconds)
            except TimeoutError:
                present = {seat.rank for seat in self._step.seats}
                absent = [rank for rank in range(self.world_size) if rank not in present]
                self._step.end()
                raise PeerLostError(
                    f"ranks {absent} of {self.world_size} did not connect within {timeout_seconds:g} s; look at "
                    f"{log_folder} and at the job's nodes, or raise cluster.start_timeout_seconds"
                ) from None
            finally:
                key_file.unlink()

    async def _srun(self, log_folder: Path, environment: Mapping[str, str], arguments: list[str]) -> _Step:
        nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
        per_node = self.world_size // nodes
        shared = {
            **{"PYTHONUNBUFFERED": "1", **os.environ, **environment},
            **{"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(self._port.getsockname()[1])},
            **{"WORLD_SIZE": str(self.world_size), "LOCAL_WORLD_SIZE": str(per_node)},
        }
        command = [
            "srun", f"--nodes={nodes}", f"--ntasks={self.world_size}", f"--ntasks-per-node={per_node}",
            "--distribution=block", "--kill-on-bad-exit=1", "--overlap", "--open-mode=append",
            f"--output={log_folder.absolute()}/rank_%4t.log", *self.options,
            sys.executable, "-P", "-m", "megarl.workers.srun_group", *arguments,
        ]  # fmt: skip
        return _Step(await asyncio.create_subprocess_exec(*command, env=shared, start_new_session=True))

    async def _seat_all(self, server: socket.socket, key: bytes, log_folder: Path) -> None:
        loop, step = asyncio.get_running_loop(), self._step
        while len(step.seats) < self.world_size:
            accepted = asyncio.ensure_future(loop.sock_accept(server))
            await asyncio.wait([accepted, step.ended], return_when=asyncio.FIRST_COMPLETED)
            if step.ended.done():
                accepted.cancel()
                logs = sorted(log_folder.glob("rank_*.log"))[:1]
                tail = "\n".join(logs[0].read_text(errors="replace").splitlines()[-20:]) if logs else ""
                raise PeerLostError(
                    f"srun ended with {step.ended.result()} before all ranks connected\n{tail}".rstrip()
                )
            connected, _ = accepted.result()
            if (known := await loop.run_in_executor(None, _introduced, connected, key)) is None:
                connected.close()
                continue
            rank, host = known
            step.seats.append(_Task(rank, host, connected, log_folder / f"rank_{rank:04d}.log", step))
        self._seats = sorted(step.seats, key=lambda seat: seat.rank)

    async def _end(self) -> None:
        await super()._end()
        if (step := getattr(self, "_step", None)) is not None:
            step.end()
            await step.ended


def _introduced(connected: socket.socket, key: bytes) -> tuple[int, str] | None:
    """Rank and node at the other end of a new connection; None of one that does not know the key."""
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _INTRODUCTION_SECONDS, 0))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        with Connection(os.dup(connected.fileno())) as connection:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            return connection.recv()
    except (AuthenticationError, OSError, EOFError):
        return None


def main() -> None:
    """A task of the job: arguments are the driver's host and port and the file of the key."""
    host, port, key_file = sys.argv[1:]
    die_with(os.getppid())
    os.environ["RANK"], os.environ["LOCAL_RANK"] = os.environ["SLURM_PROCID"], os.environ["SLURM_LOCALID"]
    with Client((host, int(port)), authkey=Path(key_file).read_bytes()) as connection:
        connection.send((int(os.environ["RANK"]), os.environ.get("SLURMD_NODENAME", socket.gethostname())))
        sock = socket.socket(fileno=os.dup(connection.fileno()))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    serve(sock)


if __name__ == "__main__":
    main()
