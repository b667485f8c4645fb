"""Start of an HTTP server at an address of this machine."""

from __future__ import annotations

from aiohttp import web

from megarl.processes.listening import in_url, taken_text
from megarl.types import ConfigError


async def listen(runner: web.AppRunner, host: str, port: int, field: str) -> str:
    """Start a server at an address, and return its base URL. Port 0 takes any free port.

    Raises ConfigError with the recipe field of the port if the address is not available; the runner is closed then.
    """
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"{field} = {port}: {taken_text(host, port, error.strerror or str(error))}") from error
    return f"http://{in_url(host)}:{runner.addresses[0][1]}"
