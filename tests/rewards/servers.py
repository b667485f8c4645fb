"""A server that judges, with the faults that it is told to have; it counts what it does."""

import asyncio
import contextlib
import re
from collections import Counter, defaultdict

from aiohttp import web


class JudgeServer:
    """Chat completions: the verdict of a completion `NUMBER ...` is CORRECT for even numbers.

    `faults` are those of a number's calls in turn, of None those without a number: a status, "hang", "drop" or
    "nonsense"; then there is none.
    """

    def __init__(self, faults=None):
        self.faults = faults or {}
        self.counts = Counter()
        self.asked = []
        self.headers = []
        self.in_flight = self.most_in_flight = 0
        self.waits_for = 0
        """No call is answered before so many are here at once."""
        self._all_here = asyncio.Event()
        self._calls: defaultdict[int | None, int] = defaultdict(int)

    async def answer(self, request):
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers)
        self.counts["calls"] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.in_flight >= self.waits_for:
                self._all_here.set()
            await self._all_here.wait()
            return await self._answered(request, body)
        finally:
            self.in_flight -= 1

    async def _answered(self, request, body):
        found = re.search(r"solution (\d+)", body["messages"][-1]["content"])
        number = int(found[1]) if found else None
        faults = self.faults.get(number, ())
        fault = faults[self._calls[number]] if self._calls[number] < len(faults) else None
        self._calls[number] += 1
        self.counts[fault] += 1
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            request.transport.abort()
            return web.Response()
        if isinstance(fault, int):
            return web.Response(status=fault, text="a fault", headers={"Retry-After": "0"})
        said = "Who can tell?" if fault == "nonsense" else f"So:\n**{'IN' if (number or 0) % 2 else ''}CORRECT**"
        usage = {"prompt_tokens": 100 + (number or 0), "completion_tokens": 7}
        return web.json_response({"choices": [{"message": {"content": said}}], "usage": usage})

    @contextlib.asynccontextmanager
    async def serving(self, path="/v1/chat/completions", handler=None):
        """The address, while it answers."""
        app = web.Application()
        app.router.add_post(path, handler or self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
