"""Group of rank processes inside a Slurm job. `srun` starts one task per rank; the driver runs on the job's first
node.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from megarl.cluster.connected import Address, ConnectedGroup, RemoteHandle, connect
from megarl.cluster.rank import leave
from megarl.cluster.topology import Introduction, NodeKind
from megarl.cluster.worker_group import PartOfRun, WorkerGroup
from megarl.platform.commands import run_command
from megarl.processes.launcher import DEVNULL, LaunchedProgram
from megarl.processes.process_tree import die_with
from megarl.types import ConfigError, PeerLostError

_ANSWER_SECONDS = 20.0
"""Seconds for a node to start a process. A node that needs more is taken for dead."""


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
        part = part or PartOfRun(0, world_size, secrets.token_bytes(32))
        if kind is None:
            nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
            kind = NodeKind(0, nodes, part.num_ranks // nodes)
        super().__init__(
            world_size, part, ranks_per_node=kind.ranks_per_node, first_place=part.first_rank - kind.first_rank
        )
        self._options, self.kind = options, kind
        self._srun: LaunchedProgram | None = None
        self._is_ending = False
        self._kills: list[LaunchedProgram] = []
        """Steps that kill single processes. One for a dead node may take long."""
        self._nodes: list[str] = []
        """Names of the job's nodes, in the order in which places are numbered. A spare node takes the position of the
        dead node replaced by it, and the dead one takes the spare node's. Groups on the same nodes share the list.
        """

    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        placed, kind = {}, self.kind
        count = len(self.new_places)
        is_whole_job = count == self.part.num_ranks and int(os.environ["SLURM_JOB_NUM_NODES"]) == kind.nodes
        if is_whole_job and not self._former:
            sizes = [f"--nodes={kind.nodes}", f"--ntasks-per-node={kind.ranks_per_node}", "--distribution=block"]
        else:
            # SLURM_HOSTFILE has a line per task: the name of its node. Only --distribution=arbitrary reads it.
            names = await self._nodes_of_new_places()
            hosts = (log_folder / self.start_log).with_suffix(".nodes")
            hosts.write_text("".join(f"{name}\n" for name in names))
            placed = {"SLURM_HOSTFILE": str(hosts.absolute())}
            sizes = [f"--nodes={len(set(names))}", "--distribution=arbitrary"]
            sizes += self._component
        # If ranks are to survive a loss, one failed task or node must not end the other tasks of the step. --wait=0: no
        # time limit after the first task has ended.
        ends = ["--kill-on-bad-exit=0", "--no-kill", "--wait=0"] if self.keeps_survivors else ["--kill-on-bad-exit=1"]
        # --overlap: the steps of several groups run in one job. -P: no import from the current folder.
        command = [
            "srun", *sizes, f"--ntasks={count}", *ends, "--overlap",
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

    @property
    def _component(self) -> list[str]:
        """Option of srun for the group's nodes in a heterogeneous job."""
        return [] if self.kind.component is None else [f"--het-group={self.kind.component}"]

    def _on_node(self, node: str, *command: str) -> LaunchedProgram:
        """Start a short program on one node of the job, in a step of its own."""
        return LaunchedProgram(self._command_on(node, *command), stderr=DEVNULL)

    def _command_on(self, node: str, *command: str) -> list[str]:
        place = ["--nodes=1", "--ntasks=1", f"--nodelist={node}", *self._component]
        return ["srun", "--overlap", *place, *command]

    async def _nodes_of_new_places(self) -> list[str]:
        """Return the node of each process to start. A dead node is replaced by a spare one.

        Raises PeerLostError if there is none.
        """
        nodes = await self._job_nodes()
        wanted = {self._node_of(place) for place in self.new_places}
        if absent := [number for number in wanted if number >= len(nodes)]:
            raise PeerLostError(
                f"the job has {len(nodes)} nodes, and its ranks need {max(absent) + 1}; start a larger job"
            )
        # In the first start of a run all nodes are new.
        if self.former_places or self.others():
            used = {self._node_of(h.place) for h in self._inherited.values()}
            other_nodes = {self._node_of(place) for place in self.taken_places()}
            # Other groups of the run may use the first nodes of the job.
            first = 0 if self.world_size == self.part.num_ranks else self.kind.nodes
            spares = [number for number in range(first, len(nodes)) if number not in used | wanted | other_nodes]
            for number in sorted(wanted - used):
                while not await self._answers(name := nodes[number]):
                    if nodes[number] != name:
                        # Another group on this node has replaced it meanwhile.
                        continue
                    if not spares:
                        raise PeerLostError(
                            f"could not start a process on node {name}, and no spare node is left in this job; "
                            "submit the next job with a higher cluster.spare_nodes"
                        )
                    spare = spares.pop(0)
                    nodes[number], nodes[spare] = nodes[spare], name
        return [nodes[self._node_of(place)] for place in self.new_places]

    async def reserve(self, count: int, leaving: Collection[WorkerGroup] = (), num_further: int = 0) -> None:
        used, silent = Counter(map(self._node_of, (*self.places, *self.taken_places(leaving)))), set[int]()
        num_missing = count - self.world_size + num_further
        for number, name in enumerate(await self._job_nodes()):
            if num_missing <= 0:
                break
            if used[number] or await self._answers(name):
                num_missing -= self.ranks_per_node - used[number]
            else:
                silent.add(number)
        if num_missing > 0:
            raise ConfigError(
                f"cluster.nodes: {count} ranks are wanted, but the nodes of this job that start processes have room "
                f"for {count - num_missing}, {self.ranks_per_node} on each; ask for fewer ranks, or start a larger job"
            )
        self._silent_nodes = silent

    async def _job_nodes(self) -> list[str]:
        """Return the nodes of this job, or of its component for the group. Raises PeerLostError."""
        groups = sorted((self, *self.others()), key=lambda group: group.part.first_rank)
        shared_lists = [g._nodes for g in groups if isinstance(g, SrunGroup) and self.shares_nodes(g) and g._nodes]
        if shared_lists:
            self._nodes = shared_lists[0]
            return self._nodes
        component = "" if self.kind.component is None else f"_HET_GROUP_{self.kind.component}"
        command = ["scontrol", "show", "hostnames", os.environ[f"SLURM_JOB_NODELIST{component}"]]
        listing = await asyncio.to_thread(run_command, command)
        if listing.returncode:
            raise PeerLostError(f"scontrol cannot list the nodes of this job: {listing.stderr.strip()}")
        self._nodes = listing.stdout.split()
        return self._nodes

    async def _answers(self, node: str) -> bool:
        """Return whether a node of this job starts a process that can import megarl."""
        trial = self._on_node(node, *self._options, sys.executable, "-P", "-c", "import megarl")
        try:
            return await asyncio.wait_for(trial.wait_for_end(), _ANSWER_SECONDS) == 0
        except TimeoutError:
            return False
        finally:
            trial.kill()

    async def await_end(self) -> str:
        assert self._srun is not None
        return f"srun ended with {await self._srun.wait_for_end()}"

    def show_stacks(self) -> None:
        for group in (*self._former, self):
            assert isinstance(group, SrunGroup)
            if group._srun is not None:
                # srun forwards it to its tasks.
                group._srun.signal(signal.SIGUSR2)

    def end_processes(self) -> None:
        if self._srun is not None:
            # On SIGTERM, srun makes Slurm kill all tasks.
            self._srun.signal(signal.SIGTERM)
        self._is_ending = True
        for kill in self._kills:
            kill.kill()

    def kill_process(self, handle: RemoteHandle) -> None:
        if not self.keeps_survivors:
            self.end_processes()
        elif not self._is_ending:
            # A step of its own, because srun can only signal all tasks of a step.
            self._kills = [kill for kill in self._kills if kill.exit_code() is None]
            self._kills.append(self._on_node(handle.node, "kill", "-KILL", str(handle.process.pid)))

    def places_of_threads(self, handle: RemoteHandle, seconds: float) -> str:
        # The step and its interpreter need a part of the time.
        inside = "megarl.platform.native_stacks", str(handle.process.pid), str(seconds / 2)
        command = self._command_on(handle.node, *self._options, sys.executable, "-P", "-m", *inside)
        try:
            done = run_command(command, seconds=seconds)
        except OSError as error:
            return f"no native stacks: {error}"
        return done.stdout.strip() or f"no native stacks: srun ended with code {done.returncode}: {done.stderr.strip()}"

    def shares_nodes(self, group: WorkerGroup) -> bool:
        # The nodes of each component of a heterogeneous job are numbered from 0.
        return isinstance(group, SrunGroup) and group.kind.component == self.kind.component

    def _sibling(self, world_size: int, part: PartOfRun) -> Self:
        sibling = type(self)(world_size, self._options, part, self.kind)
        sibling._nodes = self._nodes
        return sibling


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
    process = Introduction(turn, name, socket.gethostname(), tuple(switches), pid=os.getpid())
    connect((host, int(port)), key, process)
    leave()


if __name__ == "__main__":
    main()
