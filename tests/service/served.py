"""A service in this process, and programs with the real SDK against it in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from megarl.service.accounts import Accounts
from megarl.service.admission import QueueLimits
from megarl.service.checkpoints import Checkpoints
from megarl.service.desk import Desk
from megarl.service.routes import make_server
from megarl.service.trainer import Trainer

PROGRAM = Path(__file__).with_name("sdk_program.py")


@asynccontextmanager
async def serving(
    trainer: Trainer, folder: Path, accounts: Accounts | None = None, limits: QueueLimits | None = None
) -> AsyncIterator[str]:
    """Serve a trainer, and yield the URL."""
    desk = Desk(trainer, Checkpoints(folder), report=print, limits=limits)
    server = make_server(desk, accounts or Accounts(None), hold_seconds=2.0)
    url = await server.start("127.0.0.1", 0)
    try:
        yield url
    finally:
        await server.close()


async def run_program(url: str, name: str, base: str = "Qwen/Qwen3-8B", **environment: str) -> dict[str, Any]:
    """Run a program of `sdk_program`, and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), url, name, base, stdout=-1, stderr=-1,
        env={**os.environ, "TINKER_TELEMETRY": "0", "PYTHONWARNINGS": "ignore", **environment},
    )  # fmt: skip
    output, log = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, log.decode()[-3000:]
    return json.loads(output.decode().splitlines()[-1])
