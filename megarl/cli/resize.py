"""The command `megarl resize`: change the parallel sizes of a running run between two steps."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer

from megarl.cli.arguments import Overrides
from megarl.console import print_lines
from megarl.types import ConfigError


def resize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a running run (runs/NAME).")],
    overrides: Overrides = None,
) -> None:
    """Change the number of ranks and the parallel sizes of a run while it runs, after its current step.

    Overrides give the new sizes, for example cluster.ranks_per_node=4 trainer.tp=2. Weights and optimizer state move in
    memory; processes that the new sizes need are kept. The command returns at once. The run prints a warning when it
    changes, or why it cannot; then it continues unchanged.
    """
    from megarl.config.recipe import load
    from megarl.loops.resizing import FIELDS, refuse_other_fields, request, resized
    from megarl.tracking.earlier_run import EarlierRun

    if not overrides:
        raise ConfigError(f"megarl resize: give the new sizes as overrides; it can change {', '.join(FIELDS)}")
    state = EarlierRun.read(run).status.get("state")
    if state != "running":
        raise ConfigError(f"{run}: the run is not running (status.json: {state}); start it with megarl train")
    before = load(run / "config.yaml", ())
    after = load(run / "config.yaml", overrides)
    names = [text.partition("=")[0] for text in overrides]
    refuse_other_fields(names)
    values = {name: attrgetter(name)(after) for name in names}
    _, layout = resized(before, values)
    request(run, values)
    print_lines([f"{run}: changes to {layout} after its current step"])
