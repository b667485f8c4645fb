"""A real MLflow server takes a run from the tracker, and MLflow's own client reads back what was logged.

MLflow is installed, from the package index, into a virtual environment of its own in --venv, which may be there from
before: its pins exclude vLLM's. The run has 1,200 metrics a step and is resumed once; its recipe's texts have quotation
marks and letters beyond ASCII. A row per kind of record; it fails if the client reads anything else than was logged.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megarl.config import Recipe
from megarl.tracking.trackers.mlflow import MLflow
from tools.runs import make_environment

DURATION = {"full": "70 s, with the download of MLflow"}
SMALL: dict[str, Any] = {}
PACKAGE = "mlflow==3.17.2"
EXPERIMENT = "it's an \N{GREEK SMALL LETTER ALPHA}"
PROMPT = "\N{SNOWMAN} 'single' \"double\""
NUM_METRICS = 1200
START_SECONDS = 180.0
READ = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
[run] = client.search_runs([client.get_experiment_by_name(sys.argv[2]).experiment_id])
history = client.get_metric_history(run.info.run_id, "reward/mean")
read = {"status": run.info.status, "params": run.data.params, "metrics": run.data.metrics}
print(json.dumps({**read, "reward": [(entry.step, entry.value) for entry in history]}))
"""


@contextmanager
def serve(python: Path, folder: Path) -> Iterator[str]:
    """Run a server inside this context, and yield its address. Raises SystemExit with its output if it fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'runs.db'}", "--artifacts-destination", folder / "artifacts",
    ]  # fmt: skip
    with (folder / "server.log").open("w+") as log:
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, start_new_session=True)
        try:
            _await_health(server, address, folder / "server.log")
            yield address
        finally:
            os.killpg(server.pid, 9)
            server.wait()


def _await_health(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).read()
            return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)


def log_run(folder: Path) -> None:
    """Log a run with two starts. The second continues the record of the first."""
    sections = {
        "name": "small", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t", "system_prompt": PROMPT},
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(Recipe.model_validate(sections).model_dump(mode="json")))
    for resumed_step in (0, 1):
        tracker = MLflow(folder, resumed_step)
        step = resumed_step + 1
        many = {f"many/{number}": float(step) for number in range(NUM_METRICS)}
        tracker.log(step, {"reward/mean": step / 4, "train/loss": float("nan"), **many})
        tracker.close()


def compare(read: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compare what the client read with what was logged."""
    expected: dict[str, Any] = {
        "status": "FINISHED",
        "reward": [[1, 0.25], [2, 0.5]],
        "metrics": {"reward/mean": 0.5, **{f"many/{number}": 2.0 for number in range(NUM_METRICS)}},
        "system prompt": PROMPT,
    }
    read |= {"system prompt": read["params"].get("data.system_prompt")}
    for name, value in expected.items():
        is_equal = read[name] == value
        yield {"record": name, "read": "as logged" if is_equal else f"{read[name]!r:.200}", "met": is_equal}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--venv", type=Path)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory(prefix="megarl_mlflow_") as temporary:
        folder = Path(temporary)
        python = make_environment(options.venv or folder / "venv", [PACKAGE])
        with serve(python, folder) as address:
            os.environ |= {"MLFLOW_TRACKING_URI": address, "MLFLOW_EXPERIMENT_NAME": EXPERIMENT}
            log_run(folder / "small")
            command = [python, "-c", READ, address, EXPERIMENT]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
    yield from compare(json.loads(done.stdout.splitlines()[-1]))
