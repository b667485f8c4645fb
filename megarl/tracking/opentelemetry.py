"""Export of spans to an OpenTelemetry collector, in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megarl.terminal import FirstOfEachKind
from megarl.types import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_QUEUE_SPANS = 1 << 16
"""Number of spans that wait for their export. Further ones are dropped, so a slow collector never stops the run. Each
takes about 2 KB."""
_EXPORT_SECONDS = 10
"""Seconds for one export of a batch with its repetitions."""


def check_export(url: str) -> None:
    """Raise ConfigError if the libraries for the export of spans cannot be imported."""
    try:
        import_module(_EXPORTER)
        import_module("opentelemetry.sdk.trace.export")
    except Exception as error:  # another library's module: it may raise anything
        raise ConfigError(
            f"monitor.otlp_url: cannot import OpenTelemetry ({type(error).__name__}: {error}); run "
            "launch/setup.sh otel, or leave the field out"
        ) from error


class SpanExport:
    """Tracer whose spans are sent to a collector by a thread of their own. A failing collector gives one warning.

    OpenTelemetry's own variables add to it, for example OTEL_EXPORTER_OTLP_HEADERS (an access token) and
    OTEL_RESOURCE_ATTRIBUTES.
    """

    def __init__(self, url: str, run: str, notice: Callable[[str], object]) -> None:
        """Start the export to the OTLP/HTTP address `url`. `notice` is called with a warning, from any thread."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._log = _Warnings(url, notice)
        # The library reports failed exports to its loggers only.
        logging.getLogger("opentelemetry").addHandler(self._log)
        resource = Resource.create({"service.name": "megarl", "megarl.run": run})
        # shutdown_on_exit: the run closes the export itself, and an exit handler would run in forked processes too.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_QUEUE_SPANS, export_timeout_millis=1000 * _EXPORT_SECONDS)
        )

    @property
    def tracer(self) -> Tracer:
        """Tracer for the run's spans."""
        return self._provider.get_tracer("megarl")

    def close(self) -> None:
        """Send the remaining spans, then end the thread. An unreachable collector makes this take up to 30 s, which is
        the limit of OpenTelemetry 1.45."""
        self._provider.shutdown()
        logging.getLogger("opentelemetry").removeHandler(self._log)


class _Warnings(logging.Handler):
    """Log handler that passes the library's first warning of each logger to the run's screen."""

    def __init__(self, url: str, notice: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        # Without user, password and query, which may be secrets.
        self._place = urlsplit(url).hostname
        self._notices = FirstOfEachKind(notice)

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        self._notices.tell(
            record.name,
            f"monitor.otlp_url = {self._place}: {text:.300}. The run continues; spans that cannot be sent are dropped",
        )
