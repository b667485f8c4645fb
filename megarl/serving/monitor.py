"""HTTP pages for monitoring: `/metrics` in the format of Prometheus, and `/health` as JSON, behind a bearer token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megarl.config.sections.monitor import MonitorConfig
from megarl.rollout.pool import PoolLoad
from megarl.serving.http_server import HttpServer
from megarl.serving.keys import is_token, key_of

_SHUTDOWN_SECONDS = 1.0
"""Seconds for running scrapes to end at shutdown."""
_MAX_CONNECTIONS = 64
"""Maximum connections with the token to the run's server."""
_HEALTHY = ("starting", "running", "done", "ok")
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper limits in seconds of the histogram of request times. A completion may take minutes."""


class EngineLoad:
    """Collector of the engines' load: requests, replicas, sampled tokens. `load` returns None before the start."""

    def __init__(self, load: Callable[[], PoolLoad | None]) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        load = self._load()
        if load is None:
            return
        requests = GaugeMetricFamily(
            "megarl_engine_requests", "requests running in engines, and waiting in the driver", labels=["state"]
        )
        requests.add_metric(["running"], load.num_running)
        requests.add_metric(["waiting"], load.num_waiting)
        yield requests
        replicas = GaugeMetricFamily("megarl_engine_replicas", "replicas of the engine", labels=["state"])
        replicas.add_metric(["live"], load.num_live)
        replicas.add_metric(["lost"], load.num_lost)
        yield replicas
        yield GaugeMetricFamily("megarl_engine_paused", "1 if the engines are paused, else 0", float(load.is_paused))
        yield CounterMetricFamily(
            "megarl_engine_sampled_tokens", "tokens sampled since the start", load.num_sampled_tokens
        )


class EndpointMetrics:
    """Metrics of an endpoint: requests by page and status, request times, open sessions, engine load."""

    def __init__(self, num_sessions: Callable[[], int], load: Callable[[], PoolLoad | None]) -> None:
        self.registry = make_registry(EngineLoad(load))
        self._load, self._num_sessions = load, num_sessions
        self._requests = Counter(
            "megarl_endpoint_requests", "answered requests", ["page", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "megarl_endpoint_request_seconds", "time to answer a request", ["page"], buckets=_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        Gauge("megarl_endpoint_sessions", "open sessions", registry=self.registry).set_function(num_sessions)

    def count_request(self, request: web.Request, status: int, seconds: float) -> None:
        """Count an answered request by its page's pattern, which shows no secrets of paths."""
        resource = request.match_info.route.resource
        page = "unknown" if resource is None else resource.canonical
        self._requests.labels(page, str(status)).inc()
        self._seconds.labels(page).observe(seconds)

    def health(self) -> dict[str, Any]:
        """Return the state of the engines: starting, failed or ok."""
        load = self._load()
        if load is None:
            return {"state": "starting"}
        return {
            "state": "failed" if load.failure else "ok",
            "cause": load.failure,
            "sessions": self._num_sessions(),
            "requests": load.num_running + load.num_waiting,
        }


class Monitor:
    """HTTP server of the driver with `/metrics` and `/health`, on the loopback address or protected by a token."""

    def __init__(
        self, config: MonitorConfig, registry: CollectorRegistry, health: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Prepare the server. `health` returns JSON values with a `state`."""
        self._config, self._registry, self._health = config, registry, health
        self._server: HttpServer | None = None
        self.base_url = ""

    async def start(self) -> None:
        """Start the server of /metrics and /health."""
        port = self._config.port
        assert port is not None, "without a port no monitor is started"
        app = web.Application(middlewares=[self._admit])
        add_pages(app, self._registry, self._health)
        self._server = HttpServer(
            app, section="monitor", max_connections=_MAX_CONNECTIONS, shutdown_timeout=_SHUTDOWN_SECONDS
        )
        self.base_url = await self._server.start(self._config.host, port)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        """Handle a request. Answer 401 if it lacks the token, and 503 if too many connections have it.

        Each connection ends after one answer: scrapes are rare, and clients without the token must not hold
        connections.
        """
        assert self._server is not None, "requests come after the start"
        if not is_token(key_of(request), self._config.token):
            response: web.StreamResponse = web.json_response(
                {"error": "the request needs the header Authorization: Bearer TOKEN (monitor.token)"},
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        elif not self._server.admit(request):
            response = web.json_response(
                {"error": f"all {_MAX_CONNECTIONS} connections are in use; retry later"}, status=503
            )
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = web.json_response({"error": error.reason}, status=error.status)
        response.force_close()
        return response


def make_registry(*collectors: Collector) -> CollectorRegistry:
    """Return a new registry with these collectors: other libraries may use the default one."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def add_pages(
    app: web.Application,
    registry: CollectorRegistry,
    health: Callable[[], Mapping[str, Any]],
    check: Callable[[web.Request], object] = lambda request: None,
) -> None:
    """Add the pages `/metrics` and `/health` to a server. `check` raises an error for a request without the token.

    `/health` has status 200 if the run or endpoint is healthy, else 503.
    """
    scrape = make_aiohttp_handler(registry)

    async def answer_metrics(request: web.Request) -> web.StreamResponse:
        check(request)
        return await scrape(request)

    async def answer_health(request: web.Request) -> web.Response:
        check(request)
        report = health()
        return web.json_response(report, status=200 if report["state"] in _HEALTHY else 503)

    app.router.add_get("/metrics", answer_metrics)
    app.router.add_get("/health", answer_health)
