"""MLflow tracker: scalars and recipe, sent to a tracking server by MLflow's own client (mlflow-skinny)."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import yaml

from megarl.files.atomic import replace_text
from megarl.files.plain_yaml import flatten_sections
from megarl.types import ConfigError

_CLIENT_SETTINGS = {
    # Calls happen between two steps, so an unreachable server must not delay training for long.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables of MLflow's client, unless the user sets them."""
_METRICS_PER_CALL = 1000
"""Maximum number of metrics in MLflow's log-batch call."""
_PARAMETERS_PER_CALL = 100
"""Maximum number of parameters in MLflow's log-batch call."""
_PARAMETER_CHARACTERS = 500
"""Longest parameter value accepted by every MLflow server."""


class MLflow:
    """MLflow run on the server MLFLOW_TRACKING_URI.

    MLFLOW_EXPERIMENT_NAME names the experiment (default megarl). The client's own variables give access, for example
    MLFLOW_TRACKING_TOKEN. A resumed run continues under its id, stored in the run folder. If steps are trained again,
    MLflow shows both values.
    """

    modules: ClassVar = {"mlflow": "run launch/setup.sh mlflow, or leave the tracker out"}

    @staticmethod
    def check() -> None:
        _server()

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Create or continue the run on the server. Raises OSError if the server fails."""
        server = _server()
        for name, value in _CLIENT_SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(server)
        file = folder / "mlflow_run_id"
        # A resumed run has no id file if it had no mlflow tracker before.
        if not resumed_step or not file.exists():
            recipe = yaml.safe_load((folder / "config.yaml").read_text())
            parameters = {
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in flatten_sections(recipe).items()
            }
            replace_text(file, self._create_run(folder.name, parameters) + "\n")
        self.run_id = file.read_text().strip()
        with _server_errors():
            self._client.update_run(self.run_id, status="RUNNING")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send a step's scalars, except NaN and infinite values: MLflow rejects them."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = (Metric(name, value, now, step) for name, value in scalars.items() if math.isfinite(value))
        with _server_errors():
            while batch := list(islice(metrics, _METRICS_PER_CALL)):
                self._client.log_batch(self.run_id, metrics=batch)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: samples are files in the run folder, and not sent to MLflow."""

    def sync(self) -> None:
        """Do nothing: `log` has sent everything."""

    def close(self) -> None:
        with _server_errors():
            self._client.set_terminated(self.run_id)

    def _create_run(self, name: str, parameters: Mapping[str, str]) -> str:
        """Create a run on the server, and its experiment if it is missing. Returns the run's id."""
        from mlflow.entities import Param

        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megarl")
        with _server_errors():
            experiment = self._client.get_experiment_by_name(title)
            experiment_id = self._client.create_experiment(title) if experiment is None else experiment.experiment_id
            run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
            rows = (Param(key, value[:_PARAMETER_CHARACTERS]) for key, value in parameters.items())
            while batch := list(islice(rows, _PARAMETERS_PER_CALL)):
                self._client.log_batch(run_id, params=batch)
        return run_id


@contextmanager
def _server_errors() -> Iterator[None]:
    """Turn errors of MLflow's client (unreachable server, rejected call) into OSErrors."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise OSError(f"the MLflow server failed or refused the call: {error!s:.300}") from None


def _server() -> str:
    """Return the tracking server's address. Raises ConfigError if it is not set."""
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not server.startswith(("http://", "https://")):
        raise ConfigError(
            f"trackers = mlflow: MLFLOW_TRACKING_URI is {server or 'not set'}; set it to the address of a tracking "
            "server, such as http://127.0.0.1:5000 of `mlflow server`"
        )
    return server
