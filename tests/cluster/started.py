"""Ranks on this machine that serve a `Probe`."""

import contextlib
import tempfile
from pathlib import Path

from megarl.cluster.local import LocalGroup


@contextlib.asynccontextmanager
async def started(world_size=2, *, log_folder=None, kwargs=None, **options):
    with tempfile.TemporaryDirectory() as folder:
        group = await LocalGroup(world_size).start(
            "probe:Probe", kwargs or {}, log_folder=log_folder or Path(folder), **options
        )
        try:
            yield group
        finally:
            await group.close()
