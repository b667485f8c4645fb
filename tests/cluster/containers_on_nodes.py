"""Program for a Slurm job: starts four containers on its two nodes, and prints where they ran and what they reached."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from megarl.cluster.agents.topology import NodeKind
from megarl.cluster.launchers.srun import SrunNodes
from megarl.config.sections.rollout import AgentConfig
from megarl.serving.containers import Containers
from tests.cluster.test_containers import CALL, serve


async def main() -> None:
    server = await asyncio.start_server(serve, "0.0.0.0", 0)
    nodes = SrunNodes(NodeKind(0, 2, 1), {}, ())
    config = AgentConfig(command=("true",), sandbox="sandbox", nodes="all", max_processes=4)
    containers = Containers(config, ("0.0.0.0", server.sockets[0].getsockname()[1]), agents=lambda: nodes.agents)
    logs = tempfile.TemporaryDirectory()
    try:
        await nodes.start(Path(logs.name), 300.0)
        await containers.start()
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(containers.container(f"0.{n}")) for n in range(4)]
            ran = await asyncio.gather(*(container.execute([sys.executable, "-c", CALL], {}) for container in opened))
            answers = [text.stdout.rpartition(" ")[0] or text.stderr for text in ran]
            names = [container.node.name for container in opened]
        print(json.dumps({"names": names, "answers": answers, "left": containers.num_living}))
    finally:
        await containers.close()
        await nodes.close()
        server.close()
        logs.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
