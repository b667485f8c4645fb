"""The MLflow tracker: scalars, the recipe and samples, by the REST interface of a tracking server.

MLflow's own client cannot share an environment with vLLM, whose versions of other packages exclude its own.
"""

from __future__ import annotations

import base64
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from megarl.files.atomic import replace_text
from megarl.types import ConfigError

_TIMEOUT_SECONDS = 10.0
_METRICS_PER_CALL = 1000
_PARAMETERS_PER_CALL = 100
_PARAMETER_CHARACTERS = 500
"""Limits of MLflow's interface: of one log-batch, and of a parameter's text."""


class MLflow:
    """A run on the server of MLFLOW_TRACKING_URI; see `trackers.RunTracker`.

    MLFLOW_EXPERIMENT_NAME names its experiment (megarl), MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD, admit to it. A run that is resumed goes on under its id, which is kept in the folder; a
    metric's values of steps that are run again stand beside those of the first time.
    """

    @staticmethod
    def check() -> None:
        """Raise ConfigError where no tracking server is named."""
        _server()

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self._server = _server()
        file = folder / "mlflow_run_id"
        if not resumed_step or not file.exists():
            recipe = yaml.safe_load((folder / "config.yaml").read_text())
            replace_text(file, self._new_run(folder.name, dict(_flat(recipe))) + "\n")
        self.run_id = file.read_text().strip()
        self._update("RUNNING")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a step's scalars by name; MLflow takes no value that is not finite."""
        now = _milliseconds()
        rows = (
            {"key": name, "value": value, "timestamp": now, "step": step}
            for name, value in scalars.items()
            if math.isfinite(value)
        )
        while rows_of_call := list(islice(rows, _METRICS_PER_CALL)):
            self._post("runs/log-batch", {"run_id": self.run_id, "metrics": rows_of_call})

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: samples are files of the run folder, and artifacts go to a store of the server's own kind."""

    def sync(self) -> None:
        """Nothing: the server has what it was told."""

    def close(self) -> None:
        """Say that the run has ended."""
        self._update("FINISHED")

    def _new_run(self, name: str, parameters: Mapping[str, str]) -> str:
        """Make the run, in an experiment that is made where it is missing; the run's id."""
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megarl")
        made = self._post(
            "runs/create",
            {
                "experiment_id": self._experiment_id(experiment),
                "run_name": name,
                "start_time": _milliseconds(),
                "tags": [{"key": "mlflow.runName", "value": name}],
            },
        )
        run_id = made["run"]["info"]["run_id"]
        rows = ({"key": key, "value": value[:_PARAMETER_CHARACTERS]} for key, value in parameters.items())
        while rows_of_call := list(islice(rows, _PARAMETERS_PER_CALL)):
            self._post("runs/log-batch", {"run_id": run_id, "params": rows_of_call})
        return run_id

    def _experiment_id(self, name: str) -> str:
        found = self._post("experiments/search", {"filter": f"name = '{_quoted(name)}'", "max_results": 1})
        if found.get("experiments"):
            return found["experiments"][0]["experiment_id"]
        return self._post("experiments/create", {"name": name})["experiment_id"]

    def _update(self, status: str) -> None:
        ended = {"end_time": _milliseconds()} if status == "FINISHED" else {}
        self._post("runs/update", {"run_id": self.run_id, "status": status, **ended})

    def _post(self, call: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """One call of the interface. Raises OSError where the server is away or refuses it."""
        request = urllib.request.Request(
            f"{self._server}/api/2.0/mlflow/{call}",
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json", **_credentials()},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise OSError(f"MLflow refused {call} with {error.code}: {said}") from None
        except ValueError as error:
            raise OSError(f"MLflow's answer to {call} is no JSON: {error}") from None


def _server() -> str:
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not server.startswith(("http://", "https://")):
        raise ConfigError(
            f"trackers has mlflow, and MLFLOW_TRACKING_URI is {server or 'not set'}: set it to the address of a "
            "tracking server, such as http://127.0.0.1:5000 of `mlflow server`"
        )
    return server.rstrip("/")


def _credentials() -> dict[str, str]:
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"Authorization": f"Bearer {token}"}
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    if user:
        both = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(both.encode()).decode()}"}
    return {}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """The fields of a recipe by their dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _quoted(name: str) -> str:
    return name.replace("'", "\\'")


def _milliseconds() -> int:
    return int(time.time() * 1000)
