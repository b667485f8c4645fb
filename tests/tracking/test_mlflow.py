"""MLflow's client and a server that speaks its interface; `tools/check.py mlflow` has a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.tracking.trackers.mlflow import MLflow
from megarl.types import ConfigError

Call = tuple[str, dict[str, Any]]


class Server(ThreadingHTTPServer):
    """Answers as a tracking server does, and notes what it was asked; `refused` are calls that it refuses."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[Call] = []
        self.refused: set[str] = set()

    def of(self, call: str) -> list[dict[str, Any]]:
        return [content for name, content in self.calls if name == call]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/api/2.0/mlflow/runs/get?"):
            self.answer(200, {"run": {"info": {"run_id": "r1"}}})
        else:
            assert self.path.startswith("/api/2.0/mlflow/experiments/get-by-name?experiment_name=megarl")
            self.answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no experiment"})

    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        call = self.path.removeprefix("/api/2.0/mlflow/")
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append((call, {**content, "authorization": self.headers["Authorization"]}))
        answers = {"experiments/create": {"experiment_id": "7"}, "runs/create": {"run": {"info": {"run_id": "r1"}}}}
        if call in self.server.refused:
            self.answer(400, {"error_code": "BAD_REQUEST", "message": "the disk is full"})
        else:
            self.answer(200, answers.get(call, {}))

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{found.server_port}/")
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    sections = {"name": "small", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
    with RunFolder(Recipe.model_validate({**sections, "runs_folder": str(tmp_path)})) as found:
        found.begin()
        yield found


def test_a_run_its_recipe_and_its_steps_reach_the_server(server: Server, folder: RunFolder) -> None:
    tracker = Tracker(folder, trackers=["mlflow"])
    tracker.log(1, {"reward/mean": 0.5, "train/loss": float("nan"), **{f"many/{n}": 1.0 for n in range(1200)}})
    tracker.close()
    [made] = server.of("runs/create")
    assert (made["experiment_id"], made["run_name"], made["authorization"]) == ("7", "small", "Bearer secret")
    batches = server.of("runs/log-batch")
    parameters = {row["key"]: row["value"] for batch in batches for row in batch.get("params", ())}
    assert (parameters["model.path"], parameters["train.steps"]) == ("m", "100")
    assert all(len(batch.get("params", ())) <= 100 and len(batch.get("metrics", ())) <= 1000 for batch in batches)
    metrics = {row["key"]: (row["step"], row["value"]) for batch in batches for row in batch.get("metrics", ())}
    assert metrics["reward/mean"] == (1, 0.5) and "train/loss" not in metrics and len(metrics) == 1202
    assert [update["status"] for update in server.of("runs/update")] == ["RUNNING", "FINISHED"]


def test_a_run_that_is_resumed_goes_on_under_its_id(server: Server, folder: RunFolder) -> None:
    MLflow(folder.path, 0).close()
    MLflow(folder.path, 4).log(5, {"reward/mean": 1.0})
    assert len(server.of("runs/create")) == 1 and server.of("runs/log-batch")[-1]["run_id"] == "r1"


def test_a_server_that_refuses_ends_the_tracker_and_not_the_run(
    server: Server, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(folder, trackers=["mlflow"])
    server.refused = {"runs/log-batch"}
    tracker.log(1, {"reward/mean": 0.5})
    tracker.log(2, {"reward/mean": 0.5})
    assert capsys.readouterr().out.count("the disk is full") == 1
    assert len(folder.metrics_file.read_text().splitlines()) == 2


def test_without_a_server_it_is_refused(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI is mlruns; set it to the address"):
        MLflow(folder.path, 0)
