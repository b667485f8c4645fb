"""Spans sent to an OpenTelemetry collector: an HTTP server here that decodes them by OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from megarl.tracking.opentelemetry import SpanExport


class Collector(ThreadingHTTPServer):
    """Collector with the requests that it received. It answers all with HTTP status `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[ExportTraceServiceRequest] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        if self.path == "/v1/traces" and self.server.status == 200:
            self.server.received.append(ExportTraceServiceRequest.FromString(content))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_spans_reach_the_collector_at_the_end_at_the_latest(collector: Collector) -> None:
    notices: list[str] = []
    export = SpanExport(collector.url, "small", notices.append)
    export.tracer.start_span("attempt", attributes={"megarl.reward": 0.5}).end()
    export.close()
    [sent] = collector.received
    [of_resource] = sent.resource_spans
    resource = {item.key: item.value.string_value for item in of_resource.resource.attributes}
    assert resource["service.name"] == "megarl" and resource["megarl.run"] == "small"
    [span] = of_resource.scope_spans[0].spans
    assert (span.name, span.attributes[0].key, span.attributes[0].value.double_value) == (
        "attempt", "megarl.reward", 0.5,
    )  # fmt: skip
    assert notices == []


def test_a_collector_that_refuses_gives_one_warning(collector: Collector) -> None:
    collector.status = 400
    notices: list[str] = []
    export = SpanExport(collector.url, "small", notices.append)
    for _ in range(3):
        export.tracer.start_span("attempt").end()
    export.close()
    [text] = notices
    assert text.startswith("monitor.otlp_url = 127.0.0.1: ") and "The run continues" in text


def test_an_unreachable_collector_does_not_hold_the_end_for_long(collector: Collector) -> None:
    url = collector.url.replace(str(collector.server_port), "9")
    notices: list[str] = []
    export = SpanExport(url, "small", notices.append)
    export.tracer.start_span("attempt").end()
    began = time.monotonic()
    export.close()
    assert time.monotonic() - began < 30 and notices
