"""Group of rank processes inside a Slurm job. `srun` starts one task per rank; the driver runs on the job's first
node.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.cluster.connected import Address, ConnectedGroup, connect
from megarl.cluster.rank import leave
from megarl.cluster.topology import Introduction, NodeKind
from megarl.cluster.worker_group import PartOfRun
from megarl.platform.commands import run_command
from megarl.processes.launcher import LaunchedProgram
from megarl.processes.process_tree import die_with
from megarl.types import PeerLostError


class SrunGroup(ConnectedGroup):
    """Group of rank processes that `srun` starts as the tasks of a job step. Call `start` on a new object within the
    job.

    `options` are further options of srun. If the run has several groups, a group fills the nodes of its `kind`, node by
    node in Slurm's order. So the ranks of an engine share a node if their number divides a node's. Without `kind`, the
    group is the whole run, on all nodes of the job. The secret key is sent over standard input; srun forwards it to
    every task. No other user can read it, and no file holds it.
    """

    def __init__(
        self,
        world_size: int,
        options: Sequence[str] = (),
        part: PartOfRun | None = None,
        kind: NodeKind | None = None,
    ) -> None:
        super().__init__(world_size, part)
        self._options = options
        if kind is None:
            nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
            kind = NodeKind(0, nodes, self.part.num_ranks // nodes)
        self._kind = kind
        self._placed: Path | None = None
        self._srun: LaunchedProgram | None = None

    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        placed, kind = {}, self._kind
        if self.world_size == self.part.num_ranks:
            sizes = [f"--nodes={kind.nodes}", f"--ntasks-per-node={kind.ranks_per_node}", "--distribution=block"]
        else:
            # SLURM_HOSTFILE has a line per task: the name of its node. Only --distribution=arbitrary reads it.
            names = await asyncio.to_thread(self._nodes)
            self._placed = log_folder / f"nodes_{self.part.first_rank:04d}.txt"
            self._placed.write_text("".join(f"{name}\n" for name in names))
            placed = {"SLURM_HOSTFILE": str(self._placed.absolute())}
            sizes = [f"--nodes={len(set(names))}", "--distribution=arbitrary"]
            sizes += [] if kind.component is None else [f"--het-group={kind.component}"]
        # --overlap: the steps of several groups run in one job. -P: no import from the current folder.
        command = [
            "srun", *sizes, f"--ntasks={self.world_size}", "--kill-on-bad-exit=1", "--overlap",
            f"--output={log_folder.absolute() / self.start_log}", *self._options,
            sys.executable, "-P", "-m", "megarl.cluster.srun", address[0], str(address[1]),
        ]  # fmt: skip
        inherited = dict(os.environ)
        if placed:
            # The number for the whole job would contradict the placement of this group.
            inherited.pop("SLURM_NTASKS_PER_NODE", None)
        self._srun = LaunchedProgram(
            command, environment={**inherited, **environment, **placed}, secret=f"{key.hex()}\n".encode()
        )

    def _nodes(self) -> list[str]:
        """Return the node of each of the group's tasks."""
        component = "" if self._kind.component is None else f"_HET_GROUP_{self._kind.component}"
        listing = run_command(["scontrol", "show", "hostnames", os.environ[f"SLURM_JOB_NODELIST{component}"]])
        if listing.returncode:
            raise PeerLostError(f"scontrol cannot list the nodes of this job: {listing.stderr.strip()}")
        names = listing.stdout.split()
        first = self.part.first_rank - self._kind.first_rank
        return [names[number // self._kind.ranks_per_node] for number in range(first, first + self.world_size)]

    def local_ranks(self, processes: Sequence[Introduction]) -> Sequence[int] | None:
        first = self.part.first_rank - self._kind.first_rank
        return [(first + process.turn) % self._kind.ranks_per_node for process in processes]

    async def await_end(self) -> str:
        assert self._srun is not None
        return f"srun ended with {await self._srun.ended()}"

    def show_stacks(self) -> None:
        if self._srun is not None:
            # srun forwards it to its tasks.
            self._srun.signal(signal.SIGUSR2)

    def end_processes(self) -> None:
        if self._srun is not None:
            # On SIGTERM, srun makes Slurm kill all tasks.
            self._srun.signal(signal.SIGTERM)


def main() -> None:
    """Main function of a task. The arguments are the driver's host and port."""
    host, port = sys.argv[1:]
    die_with(os.getppid())
    key = bytes.fromhex(sys.stdin.readline())
    # Slurm gives the switches above the node, and its name, joined by dots. Names may contain dots too, so the split
    # stops after as many dots as the pattern has.
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    dots = os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
    switches = os.environ.get("SLURM_TOPOLOGY_ADDR", name).split(".", dots)[:-1]
    turn = int(os.environ["SLURM_PROCID"])
    connect((host, int(port)), key, Introduction(turn, name, socket.gethostname(), tuple(switches)))
    leave()


if __name__ == "__main__":
    main()
