"""Forks (`megarl fork`): new runs that continue an earlier run's checkpoint with a changed recipe.

A fork continues with the weights, the optimizer's state, the step number and the position in the data. Changes that a
resume refuses (other data, another model) are refused here too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from megarl.checkpoint.manifest import check_sizes
from megarl.config import Recipe
from megarl.config.reading.override_text import override_text
from megarl.config.recipe import load_of_run, to_yaml
from megarl.files.atomic import raise_storage_errors, replace_text
from megarl.tracking.draws import LEDGER
from megarl.tracking.run_folder import run_path
from megarl.tracking.run_record import PARENT, RunRecord
from megarl.types import ConfigError


def make_fork(run: Path, step: int, overrides: Sequence[str] = ()) -> Path:
    """Create the folder of a fork from a run's checkpoint of `step`, and return it. `train --resume` starts it.

    The folder has the recipe with `overrides`, the checkpoint, the metrics up to its step, and parent.json. Its name is
    NAME_fork_STEP unless an override sets it. Raises ConfigError for an unknown step, an existing folder or a wrong
    recipe. Raises DataError for a damaged checkpoint or a run of a newer megarl. An error leaves nothing behind.
    """
    parent_record = RunRecord.open_of_this_version(run)
    checkpoint = parent_record.checkpoint(step)
    parent_folder = run.absolute()
    fork_fields = {"runs_folder": str(parent_folder.parent), "name": f"{parent_folder.name}_fork_{step}"}
    changes = [*(override_text(field, value) for field, value in fork_fields.items()), *overrides]
    recipe = load_of_run(run, changes)
    target = run_path(recipe)
    _refuse_target(recipe, target, step)
    check_sizes(checkpoint)
    # Write the whole fork to a temporary folder, then rename it.
    parent = {"run": str(parent_folder), "name": parent_folder.name, "step": step, "megarl": version("megarl")}
    partial = target.with_name(f".{target.name}.partial")
    with raise_storage_errors(target):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            fork_checkpoint = partial / "checkpoints" / checkpoint.name
            fork_checkpoint.parent.mkdir(parents=True)
            # A checkpoint's files never change, so both runs can share them.
            shutil.copytree(checkpoint, fork_checkpoint, copy_function=_link_or_copy)
            replace_text(partial / "config.yaml", to_yaml(recipe))
            replace_text(partial / PARENT, json.dumps(parent, indent=2) + "\n")
            if (run / "metrics.jsonl").exists():
                # The start removes the lines of later steps.
                shutil.copyfile(run / "metrics.jsonl", partial / "metrics.jsonl")
            if (run / LEDGER).exists():
                shutil.copyfile(run / LEDGER, partial / LEDGER)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _refuse_target(recipe: Recipe, target: Path, step: int) -> None:
    """Raise ConfigError if the fork's folder exists, or its recipe has no step after `step`."""
    if target.exists():
        raise ConfigError(f"name = {recipe.name}: {target} exists already; choose another with --set name=NAME")
    if recipe.train.epochs is None and recipe.train.steps <= step:
        raise ConfigError(
            f"train.steps = {recipe.train.steps}: the checkpoint is of step {step}, so no step is left; raise it with "
            f"--set train.steps={step + 1} or more"
        )


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
