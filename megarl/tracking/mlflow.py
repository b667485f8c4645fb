"""MLflow tracker: scalars and recipe, sent through the REST API of a tracking server.

MLflow's own client cannot be installed with vLLM, because their dependencies conflict.
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
"""Maximum number of metrics in one log-batch call of MLflow."""
_PARAMETERS_PER_CALL = 100
"""Maximum number of parameters in one log-batch call of MLflow."""
_PARAMETER_CHARACTERS = 500
"""Maximum number of characters of a parameter's value in MLflow."""


class MLflow:
    """MLflow run on the server at MLFLOW_TRACKING_URI. The methods are those of `trackers.RunTracker`.

    MLFLOW_EXPERIMENT_NAME names the experiment (default megarl). MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD, give access. A resumed run continues under its id, stored in the run folder. If steps are
    trained again, MLflow shows both values.
    """

    @staticmethod
    def check() -> None:
        """Raise ConfigError if MLFLOW_TRACKING_URI is not set."""
        _server()

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Create the run on the server, or continue it. Raises OSError if the server fails."""
        self._server = _server()
        file = folder / "mlflow_run_id"
        # The id file may be missing in a resumed run that had no mlflow tracker before.
        if not resumed_step or not file.exists():
            recipe = yaml.safe_load((folder / "config.yaml").read_text())
            replace_text(file, self._new_run(folder.name, dict(_flat(recipe))) + "\n")
        self.run_id = file.read_text().strip()
        self._update("RUNNING")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send a step's scalars. Values that are not finite are left out, because MLflow rejects them."""
        now = _milliseconds()
        rows = (
            {"key": name, "value": value, "timestamp": now, "step": step}
            for name, value in scalars.items()
            if math.isfinite(value)
        )
        while rows_of_call := list(islice(rows, _METRICS_PER_CALL)):
            self._post("runs/log-batch", {"run_id": self.run_id, "metrics": rows_of_call})

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: samples are not sent to MLflow. They are files in the run folder."""

    def sync(self) -> None:
        """Do nothing: every call of `log` has already sent its data."""

    def close(self) -> None:
        """Mark the run as finished."""
        self._update("FINISHED")

    def _new_run(self, name: str, parameters: Mapping[str, str]) -> str:
        """Create the run, and its experiment if missing. Return the run's id."""
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
        """Return the id of an experiment. It is created if it does not exist."""
        found = self._post("experiments/search", {"filter": f"name = '{_quoted(name)}'", "max_results": 1})
        if found.get("experiments"):
            return found["experiments"][0]["experiment_id"]
        return self._post("experiments/create", {"name": name})["experiment_id"]

    def _update(self, status: str) -> None:
        """Set the status of the run."""
        ended = {"end_time": _milliseconds()} if status == "FINISHED" else {}
        self._post("runs/update", {"run_id": self.run_id, "status": status, **ended})

    def _post(self, call: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Call MLflow's REST API. Raises OSError if the server is unreachable or refuses the call."""
        request = urllib.request.Request(
            f"{self._server}/api/2.0/mlflow/{call}",
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json", **_credentials()},
        )
        try:
            # The call runs between two steps, so an unreachable server must not stop training for long.
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise OSError(f"the MLflow server refused the call {call} with HTTP status {error.code}: {said}") from None
        except ValueError as error:
            raise OSError(f"the MLflow server's answer to the call {call} is not valid JSON: {error}") from None


def _server() -> str:
    """Return the address of the tracking server. Raises ConfigError if it is not set."""
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not server.startswith(("http://", "https://")):
        raise ConfigError(
            f"trackers = mlflow: MLFLOW_TRACKING_URI is {server or 'not set'}; set it to the address of a tracking "
            "server, such as http://127.0.0.1:5000 of `mlflow server`"
        )
    return server.rstrip("/")


def _credentials() -> dict[str, str]:
    """Return the HTTP header with the user's credentials, if any are set."""
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"Authorization": f"Bearer {token}"}
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    if user:
        both = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(both.encode()).decode()}"}
    return {}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield a recipe's fields by dotted name, with values as text."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _quoted(name: str) -> str:
    """Return a name escaped for MLflow's filter expressions."""
    return name.replace("'", "\\'")


def _milliseconds() -> int:
    return int(time.time() * 1000)
