"""Spans of requests, read by OpenTelemetry's own message classes."""

import json
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue

import pytest

PATIENCE_S = 60
"""Maximum wait for a batch of spans."""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector(HTTPServer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.batches: Queue[bytes] = Queue()


class Handler(BaseHTTPRequestHandler):
    """Takes every batch."""

    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        assert self.headers["content-type"] == "application/json"
        self.server.batches.put(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_batches_are_export_requests(start: Callable) -> None:
    """Every field is one of the protocol, of its type: unknown ones are errors of the parser."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    from google.protobuf import json_format  # comes with it

    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
    try:
        with start("--speedup", "0", "--set", f"live.otlp_endpoint={endpoint}") as server:
            request = urllib.request.Request(
                f"{server.url}/v1/completions",
                b'{"prompt": "hello", "max_tokens": 3, "stream": true}',
                {
                    "content-type": "application/json",
                    "traceparent": f"00-{TRACE}-{PARENT}-01",
                    "x-request-id": "mine",
                },
            )
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                answer.read()
            raw = json.loads(collector.batches.get(timeout=PATIENCE_S))
    finally:
        collector.shutdown()
        collector.server_close()
    spans = raw["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ids = [(span.pop("traceId"), span.pop("spanId"), span.pop("parentSpanId")) for span in spans]
    # OTLP's JSON writes ids in hexadecimal digits; the parser of protobuf's JSON wants base64.
    (trace, span_id, parent) = ids[0]
    assert (trace, parent) == (TRACE, PARENT)
    assert len(bytes.fromhex(span_id)) == 8
    parsed = json_format.ParseDict(raw, service.ExportTraceServiceRequest())
    (resource,) = parsed.resource_spans
    named = {of.key: of.value.string_value for of in resource.resource.attributes}
    assert named["service.name"] == "slipstream"
    (span,) = resource.scope_spans[0].spans
    assert span.name == "POST /v1/completions"
    assert span.kind == span.SPAN_KIND_SERVER
    assert span.flags & 1 == 1
    (event,) = span.events
    assert event.name == "first_token"
    assert span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano
    values = {of.key: of.value for of in span.attributes}
    assert values["http.response.status_code"].int_value == 200
    assert values["slipstream.request_id"].string_value == "mine"
    assert values["slipstream.attempts"].int_value == 1
