"""Containers on all nodes of a job: where they ran, what they reached, and how long their starts took.

As a program in a Slurm job of two nodes it starts the number of its argument, and prints that as JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from megarl.cluster.agents.agent_link import AgentLink
from megarl.cluster.agents.topology import NodeKind
from megarl.cluster.launchers.srun import SrunNodes
from megarl.config.sections.rollout import AgentConfig
from megarl.serving.agent.containers import Containers

CALL = """
import os, socket
client = socket.create_connection(("127.0.0.1", 11811))
client.sendall(b"hello")
print(client.recv(100).decode(), os.getpid())
"""


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"got " + await reader.read(100))
    writer.close()


async def run_on_all(agents: Callable[[], Sequence[AgentLink]], number: int) -> dict[str, Any]:
    """Start containers together, run a program in each while all of them live, and end them."""
    server = await asyncio.start_server(serve, "0.0.0.0", 0)
    config = AgentConfig(command=("true",), sandbox="sandbox", nodes="all", max_processes=number, disk_gib=0.01)
    containers = Containers(config, ("0.0.0.0", server.sockets[0].getsockname()[1]), agents=agents)
    await containers.start()
    try:
        async with AsyncExitStack() as stack:
            began = time.monotonic()
            starts = (stack.enter_async_context(containers.start_container(f"0.{n}")) for n in range(number))
            opened = await asyncio.gather(*starts)
            seconds = time.monotonic() - began
            ran = await asyncio.gather(*(container.execute([sys.executable, "-c", CALL], {}) for container in opened))
            num_living = containers.num_living
    finally:
        await containers.close()
        server.close()
    start_seconds = sorted(container.seconds_to_start for container in opened)
    return {
        "nodes": Counter(container.node.name for container in opened),
        "answers": Counter(text.stdout.rpartition(" ")[0] or text.stderr for text in ran),
        "num_living": num_living,
        "left": containers.num_living + sum(container.is_leaked for container in opened),
        "seconds": round(seconds, 2),
        "start_seconds": {"median": statistics.median(start_seconds), "max": start_seconds[-1]},
    }


async def main(number: int) -> None:
    nodes = SrunNodes(NodeKind(0, 2, 1), {}, ())
    with tempfile.TemporaryDirectory() as logs:
        try:
            await nodes.start(Path(logs), 300.0)
            print(json.dumps(await run_on_all(lambda: nodes.agents, number)))
        finally:
            await nodes.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
