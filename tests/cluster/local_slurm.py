"""A real Slurm on this machine for tests: its start and end, jobs on it, and waits that hold on a busy machine."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MEGARL = str(ROOT / ".venv/bin/megarl")
_PROGRAM = Path(__file__).with_name("slurm_local.sh")
_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the kernel hands out."""
    for _ in range(1000):
        first = random.randrange(17000, 30000)
        with suppress(OSError):
            taken = [socket.create_server(("127.0.0.1", first + i)) for i in range(count)]
            for one in taken:
                one.close()
            return first
    raise AssertionError("no ports")


class Cluster:
    """Nodes of this machine, and a folder that all of them see, with a recipe and a pace for its rewards.

    `patience` is how many seconds an event may take: ten times what the slowest run without Slurm took here.
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder, self.num_nodes, self.patience = folder, num_nodes, 300.0
        self._is_changed = False
        state = folder / "state"
        path = f"{os.environ['PATH']}:/usr/sbin"
        assert shutil.which("sbatch", path=path), "no Slurm is seen here: mark the test as test_slurm.needs_slurm does"
        self.environment = {
            **os.environ,
            "PATH": path,
            "MEGARL_SLURM_DIR": str(state),
            "MEGARL_SLURM_PORT": str(free_ports(num_nodes + 1)),
            "SLURM_CONF": str(state / "slurm.conf"),
            "MEGARL_HOME": str(ROOT),
            "MEGARL_SLURM_GRACE": "600",
            "MEGARL_SLURM_TOPOLOGY": "tree",
        }

    @classmethod
    def start(cls, folder: Path, num_nodes: int) -> Cluster:
        cluster = cls(folder, num_nodes)
        cluster.local("up", str(num_nodes))
        return cluster

    def stop(self) -> None:
        """End jobs, nodes, controller and munged; waits until none of their processes is left."""
        self.local("cancel", check=False)
        for number in (signal.SIGTERM, signal.SIGKILL):
            ending = time.monotonic() + 20
            while (members := self._members()) and time.monotonic() < ending:
                for pid in members:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(0.2)
        assert not members, f"processes of Slurm do not end: {members}"
        shutil.rmtree(self.folder / "state", ignore_errors=True)

    def reset(self) -> None:
        """Make the cluster as it was: no job, not even one that was queued again, every node idle."""
        self.pace(0)
        if self._is_changed or "busy" in self.local("cancel"):
            self.stop()
            self.local("up", str(self.num_nodes))
            self._is_changed = False
            # The new controller counts jobs from one.
            for log in self.folder.glob("job_*.log"):
                log.unlink()

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Output of a command in the cluster's folder."""
        settings: dict[str, Any] = {"cwd": self.folder, "env": self.environment | environment, "timeout": 3600}
        done = subprocess.run(command, capture_output=True, text=True, **settings)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr

    def local(self, *command: str, check: bool = True, **environment: str) -> str:
        return self.run("bash", str(_PROGRAM), *command, check=check, **environment)

    def configure(self, parameters: str) -> None:
        """Other SlurmctldParameters, until the test ends."""
        self._is_changed = True
        self.local("conf", str(self.num_nodes), MEGARL_SLURM_PARAMETERS=parameters)

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node, as a loss of power would."""
        self._is_changed = True
        self.local("kill-node", node)

    def train_alone(self, *arguments: str) -> None:
        """A run without Slurm, by which the waits are measured."""
        started = time.monotonic()
        self.run(MEGARL, "train", "recipe.yaml", *arguments)
        self.patience = max(self.patience, 10 * (time.monotonic() - started))

    def submit(
        self,
        *arguments: str,
        nodes: int = 2,
        per_node: int = 1,
        script: str = "train",
        options: tuple[str, ...] = (),
        recipe: str = "recipe.yaml",
    ) -> str:
        sizes = (f"--nodes={nodes}", f"--ntasks-per-node={per_node}", f"--gpus-per-node={per_node}")
        path = str(ROOT / f"launch/slurm/{script}.sbatch")
        command = ("sbatch", "--parsable", *sizes, "--output=job_%j.log", *options, path, recipe, *arguments)
        return self.run(*command).strip()

    def pace(self, seconds: float) -> None:
        """How long each completion's score takes, four at a time; 0 for full speed."""
        path, new = self.folder / "pace", self.folder / "new_pace"
        if seconds:
            new.write_text(str(seconds))
            new.replace(path)
        else:
            path.unlink(missing_ok=True)

    def state(self, job: str) -> str:
        return self.run("scontrol", "show", "job", job).split("JobState=")[1].split()[0]

    def log(self, job: str) -> str:
        """What the job wrote, or why it did not start."""
        path = self.folder / f"job_{job}.log"
        return path.read_text() if path.exists() else self.run("scontrol", "show", "job", job)

    def status(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "runs" / name / "status.json").read_text())
        except (OSError, ValueError):
            return {"state": "absent", "step": 0, "exit_code": None}

    def until(self, job: str, is_reached: Callable[[], bool]) -> None:
        """Wait for an event; a job that ends without it is an error at once."""
        ending = time.monotonic() + self.patience
        has_ended = False
        look = 0.0
        while not is_reached():
            assert not has_ended, f"job {job} is {self.state(job)}\n{self.log(job)}"
            assert time.monotonic() < ending, f"nothing in {self.patience:.0f} s\n{self.log(job)}"
            if time.monotonic() > look:
                has_ended = self.state(job) in _ENDS
                look = time.monotonic() + 1
            time.sleep(0.05)

    def until_step(self, job: str, name: str, step: int) -> None:
        def is_there() -> bool:
            status = self.status(name)
            return status["state"] == "running" and status["step"] >= step

        self.until(job, is_there)

    def until_ended(self, job: str, name: str, exit_code: int) -> dict[str, Any]:
        """How a start of the run ended, once it has."""
        ended = ("stopped", "failed", "done")
        self.until(job, lambda: self.status(name)["state"] in ended)
        status = self.status(name)
        assert status["exit_code"] == exit_code, (status, self.log(job))
        return status

    def until_over(self, job: str) -> str:
        """The state in which the job ended for good."""
        self.until(job, lambda: self.state(job) in _ENDS)
        return self.state(job)

    def weights(self, name: str) -> bytes:
        return (self.folder / "runs" / name / "hf/model.safetensors").read_bytes()

    def _members(self) -> list[int]:
        """Process ids of the cluster and its jobs: all that were started with its configuration."""
        entry = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if entry in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found
