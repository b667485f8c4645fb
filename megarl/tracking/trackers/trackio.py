"""Trackio tracker: scalars, tables of samples, the recipe, alerts of health rules."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from megarl.tracking.trackers.sample_tables import sample_tables
from megarl.types import ConfigError


class Trackio:
    """Trackio run, stored on this machine.

    Trackio's own variables configure it: TRACKIO_PROJECT (default megarl), TRACKIO_DIR (folder of its data),
    TRACKIO_SERVER_URL with TRACKIO_WRITE_TOKEN (a server of your own), TRACKIO_SPACE_ID (a Hugging Face Space). A
    resumed run continues under its name. If steps are trained again, Trackio shows both values.
    """

    modules: ClassVar = {"trackio": "run launch/setup.sh trackio, or leave the tracker out"}

    @staticmethod
    def check() -> None:
        """Raise ConfigError if TRACKIO_SERVER_URL is not an HTTP URL or has no token."""
        server = os.environ.get("TRACKIO_SERVER_URL", "")
        if server and not server.startswith(("http://", "https://")):
            raise ConfigError(
                "trackers = trackio: TRACKIO_SERVER_URL has no scheme; set it to an address that begins with http:// "
                "or https://, or remove it to store the run on this machine"
            )
        if server and "write_token=" not in server and not os.environ.get("TRACKIO_WRITE_TOKEN"):
            raise ConfigError(
                "trackers = trackio: TRACKIO_WRITE_TOKEN is not set; set it to the token that `trackio show` prints"
            )

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Start or continue the run. Raises OSError if Trackio fails."""
        import trackio

        self._trackio = trackio
        try:
            with _silent():
                self.run = trackio.init(
                    project=os.environ.get("TRACKIO_PROJECT", "megarl"),
                    name=folder.name,
                    config=yaml.safe_load((folder / "config.yaml").read_text()),
                    # A new run with an older run's name is a different run.
                    resume="allow" if resumed_step else "never",
                    embed=False,
                    # megarl measures its ranks itself, and the driver's machine may have no rank.
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:  # another library's errors: they may be of any class
            # Report failures as OSError, so that the run continues without this tracker.
            raise OSError(f"Trackio: {type(error).__name__}: {error}") from error

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log(dict(scalars), step=step)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        for table in sample_tables(records):
            self.run.log({table.name: self._trackio.Table(columns=table.columns, data=table.rows)}, step=step)

    def unhealthy(self, step: int, rule: str, text: str) -> None:
        with _silent():
            self.run.alert(title=f"health/{rule} at step {step}", text=text)

    def sync(self) -> None:
        """Do nothing: Trackio's own thread writes logged data at once."""

    def close(self) -> None:
        # Not `run.finish`: at exit, Trackio would finish the run again, with a line on the screen.
        with _silent():
            self._trackio.finish()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discard lines that Trackio prints: they would break up the run's lines."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
