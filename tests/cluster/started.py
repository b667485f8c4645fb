"""Ranks on this machine that serve a `Probe`."""

import contextlib
import os
import tempfile
from pathlib import Path

from tests.shared_fork_servers import SHARED
from tools.local_group import LocalGroup


def shared_imports() -> list[str]:
    """Return the imports of ranks whose calls need torch: a shared fork server imports it once for all tests.

    Without shared fork servers there are none, because each test would wait for the import.
    """
    return ["megarl.groups.world"] if SHARED in os.environ else []


@contextlib.asynccontextmanager
async def started(world_size=2, *, log_folder=None, kwargs=None, **options):
    with tempfile.TemporaryDirectory() as folder:
        group = await LocalGroup(world_size, imports=shared_imports()).start(
            "probe:Probe", kwargs or {}, log_folder=log_folder or Path(folder), **options
        )
        try:
            yield group
        finally:
            await group.close()
