"""Weights & Biases tracker: scalars, tables of samples, the recipe."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import yaml

from megarl.files.atomic import replace_text
from megarl.tracking.trackers.sample_tables import sample_tables
from megarl.types import ConfigError

Mode = Literal["online", "offline", "shared", "disabled"]


class WandB:
    """Weights & Biases run in `wandb/` of the run folder.

    W&B's own variables configure it: WANDB_MODE (default offline; `wandb sync` uploads the folder later), WANDB_PROJECT
    (default megarl), WANDB_ENTITY, WANDB_API_KEY. A resumed run continues under its id, stored in the run folder. W&B
    ignores steps that it already has.
    """

    modules: ClassVar = {"wandb": "run launch/setup.sh wandb, or leave the tracker out"}

    @staticmethod
    def check() -> None:
        """Raise ConfigError for an unknown WANDB_MODE."""
        _mode()

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Create or continue the run. Raises OSError if W&B fails."""
        import wandb

        (folder / "wandb").mkdir(exist_ok=True)
        self._wandb = wandb
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "megarl"),
                name=folder.name,
                id=_run_id(folder / "wandb" / "id", is_new=not resumed_step),
                # Continue the run of this id, or create it.
                resume="allow",
                mode=_mode(),
                dir=folder,
                config=yaml.safe_load((folder / "config.yaml").read_text()),
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
                ),
            )
        except wandb.Error as error:
            # Report failures as OSError, so that the run continues without this tracker.
            raise OSError(f"W&B: {error}") from None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log(dict(scalars), step=step)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Upload the first samples of each data set in a table `samples/SET`."""
        for sample_table in sample_tables(records):
            table = self._wandb.Table(columns=list[Any](sample_table.columns))
            for row in sample_table.rows:
                table.add_data(*row)
            self.run.log({sample_table.name: table}, step=step)

    def sync(self) -> None:
        """Do nothing: W&B's own process writes logged data at once."""

    def close(self) -> None:
        self.run.finish()


def _mode() -> Mode:
    """Return WANDB_MODE, offline by default. Raises ConfigError for an unknown mode."""
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode not in get_args(Mode):
        raise ConfigError(f"WANDB_MODE = {mode}: W&B has no such mode; set one of {', '.join(get_args(Mode))}")
    return cast(Mode, mode)


def _run_id(file: Path, *, is_new: bool) -> str:
    """Return the run's W&B id, stored in a file for resumed runs."""
    if is_new or not file.exists():
        replace_text(file, secrets.token_hex(4) + "\n")
    return file.read_text().strip()
