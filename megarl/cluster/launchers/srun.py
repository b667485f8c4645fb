"""Nodes of a Slurm job. `srun` starts one agent on each; the driver runs on the first node."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from megarl.cluster.agents.agent import connect
from megarl.cluster.agents.nodes import ConnectedNodes, too_few_nodes_error
from megarl.cluster.agents.topology import Introduction, NodeKind
from megarl.platform.commands import run_command
from megarl.processes.launcher import DEVNULL, LaunchedProgram
from megarl.processes.process_tree import die_with
from megarl.types import PeerLostError

_ANSWER_SECONDS = 20.0
"""Seconds for a node to start a process. A slower node counts as dead."""
_EXIT_SECONDS = 10.0
"""Seconds for agents to end after their connections. Then Slurm kills them."""


class SrunNodes(ConnectedNodes):
    """Nodes of one kind in this job, spare nodes included. A heterogeneous job has a component for each kind.

    `options` are further options of srun. srun forwards the secret key to every task over standard input. No other user
    can read it, and no file holds it.
    """

    def __init__(
        self,
        kind: NodeKind,
        environment: Mapping[str, str],
        imports: Sequence[str],
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(kind, environment, imports)
        self._options = options
        self._steps: list[LaunchedProgram] = []
        self.start_log = f"agents_{kind.first_rank:04d}.log" if kind.first_rank else "agents.log"

    def host(self) -> str:
        return socket.gethostname()

    async def launch(self, address: tuple[str, int], key: bytes) -> int:
        names = await self._list_job_nodes()
        self._start_step(names, address, key)
        return len(names)

    async def launch_further(self, num_nodes: int, address: tuple[str, int], key: bytes) -> int:
        """Start agents on nodes of the job without a living agent, after a test that they can start a process."""
        living_nodes = {agent.node for agent in self.agents if not agent.is_lost}
        absent_nodes = [name for name in await self._list_job_nodes() if name not in living_nodes]
        answers = await asyncio.gather(*(self._is_answering(name) for name in absent_nodes))
        ready_nodes = [name for name, is_ready in zip(absent_nodes, answers, strict=True) if is_ready][:num_nodes]
        if len(ready_nodes) < num_nodes:
            raise too_few_nodes_error(len(living_nodes) + num_nodes, len(living_nodes) + len(ready_nodes))
        for name in ready_nodes:
            self._start_step([name], address, key)
        return len(ready_nodes)

    def _start_step(self, names: Sequence[str], address: tuple[str, int], key: bytes) -> None:
        """Start agents on these nodes as one step of the job: `srun` runs an agent on each."""
        log = self._log_folder.absolute() / self.start_log
        command = [
            "srun", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1",
            f"--nodelist={','.join(names)}", *self._component_options,
            # When a node or an agent is lost, the other nodes' agents continue. --wait=0: without a time limit.
            "--no-kill", "--kill-on-bad-exit=0", "--wait=0",
            # --overlap: other steps run on these nodes. --cpu-bind=none: the agent's ranks share all cores of the job.
            "--overlap", "--cpu-bind=none", "--open-mode=append", f"--output={log}", *self._options,
            sys.executable, "-P", "-m", "megarl.cluster.launchers.srun", address[0], str(address[1]),
        ]  # fmt: skip
        # The job's numbers of tasks would contradict the numbers of this step.
        inherited = {name: value for name, value in os.environ.items() if name not in _SIZES_OF_JOB}
        environment = {**inherited, "PYTHONUNBUFFERED": "1"}
        self._steps.append(LaunchedProgram(command, environment=environment, secret=f"{key.hex()}\n".encode()))

    @property
    def _component_options(self) -> list[str]:
        return [] if self.kind.component is None else [f"--het-group={self.kind.component}"]

    async def _list_job_nodes(self) -> list[str]:
        """Return the nodes of this job or component. Raises PeerLostError."""
        component_suffix = "" if self.kind.component is None else f"_HET_GROUP_{self.kind.component}"
        command = ["scontrol", "show", "hostnames", os.environ[f"SLURM_JOB_NODELIST{component_suffix}"]]
        listing = await asyncio.to_thread(run_command, command)
        if listing.returncode:
            raise PeerLostError(f"scontrol cannot list the nodes of this job: {listing.stderr.strip()}")
        return listing.stdout.split()

    async def _is_answering(self, node: str) -> bool:
        """Return whether a node can start a process that imports megarl."""
        node_options = ["--nodes=1", "--ntasks=1", f"--nodelist={node}", *self._component_options]
        program = [sys.executable, "-P", "-c", "import megarl"]
        trial_step = LaunchedProgram(["srun", "--overlap", *node_options, *self._options, *program], stderr=DEVNULL)
        try:
            return await asyncio.wait_for(trial_step.wait_for_end(), _ANSWER_SECONDS) == 0
        except TimeoutError:
            return False
        finally:
            trial_step.kill()

    async def await_end(self) -> str:
        return f"srun ended with {await self._steps[-1].wait_for_end()}"

    async def end_agents(self) -> None:
        # Without a connection agents end by themselves. srun would report each killed one as an error.
        end_tasks = [asyncio.create_task(step.wait_for_end()) for step in self._steps]
        try:
            if end_tasks:
                await asyncio.wait(end_tasks, timeout=_EXIT_SECONDS)
        finally:
            # Also after a cancellation: srun would outlive the driver if an agent hangs.
            for step in self._steps:
                # On SIGTERM, srun makes Slurm kill all tasks.
                step.signal(signal.SIGTERM)
        await asyncio.gather(*end_tasks)


_SIZES_OF_JOB = frozenset(
    {
        *("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_GPU"),
        *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
    }
)
"""Variables that srun reads as options for numbers of tasks, or for a task's share of a node. An agent needs its whole
node.
"""


def main() -> None:
    """Run the agent of a task. The program's arguments are the driver's host and port."""
    host, port = sys.argv[1:]
    die_with(os.getppid())
    key = bytes.fromhex(sys.stdin.readline())
    # Slurm gives the switches above the node, and its name, joined by dots. Names may contain dots too, so the split
    # stops after as many dots as the pattern has.
    node_name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    num_dots = os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
    switches = os.environ.get("SLURM_TOPOLOGY_ADDR", node_name).split(".", num_dots)[:-1]
    task_number = int(os.environ["SLURM_PROCID"])
    connect(
        (host, int(port)),
        key,
        Introduction(task_number, node_name, socket.gethostname(), tuple(switches), pid=os.getpid()),
    )


if __name__ == "__main__":
    main()
