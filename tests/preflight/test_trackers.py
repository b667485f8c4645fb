"""A dry run refuses what the start of a tracker would refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.preflight import check

OWN = """
import a_library_that_is_not_there


class Tracker:
    pass
"""


def test_a_tracker_that_is_not_installed(only_fault: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    # As Python has it for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "wandb", None)
    text = only_fault(trackers=["wandb"])
    assert text.startswith("trackers = wandb: cannot import wandb") and "run launch/setup.sh wandb" in text


def test_a_tracker_whose_variables_are_wrong(
    recipe: Callable[..., Recipe], only_fault: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    text = only_fault(trackers=["mlflow"])
    assert "trackers = mlflow" in text and "MLFLOW_TRACKING_URI is not set" in text
    # A job has an environment of its own, and an evaluation starts no tracker.
    check(recipe(trackers=["mlflow"], cluster={"launcher": "slurm"}), is_start=False)
    check(recipe(trackers=["mlflow"]), is_trained=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check(recipe(trackers=["tensorboard", "mlflow"]))


def test_an_own_tracker_is_imported(
    only_fault: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    text = only_fault(trackers=["own_tracker:Tracker"])
    assert text.startswith("trackers: 'own_tracker:Tracker'") and "a_library_that_is_not_there" in text
