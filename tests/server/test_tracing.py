"""OpenTelemetry spans, as a collector receives them over OTLP/HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from onedraw.errors import BadSetting
from onedraw.server.config import ServerOptions
from onedraw.settings import otlp_traces_endpoint
from tests.server.running import Served, fake_llm, serving

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

HELLO = [{"role": "user", "content": "Hello."}]
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LATENCIES = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_to_first_token", "e2e")


@dataclass
class Collector:
    url: str
    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def attributes(self, number: int = 0) -> dict[str, Any]:
        return {one.key: _value(one.value) for one in self.spans[number].attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                found.services.update(one.value.string_value for one in resource.resource.attributes if one.key == "service.name")
                found.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def traced(collector: Collector, *requests: tuple[str, dict[str, Any]], **options: Any) -> Served:
    """Send requests to a server that traces, and stop it, which sends all of its spans."""
    with fake_llm() as llm, serving(llm, ServerOptions(otlp_traces_endpoint=collector.url, **options)) as served:
        for path, body in requests:
            served.http.post(path, json=body, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"})
        served.get("/v1/models")
    return served


def test_a_span_describes_the_request_and_its_times(collector: Collector) -> None:
    asked = {"messages": HELLO, "max_tokens": 9, "temperature": 0.5, "seed": 3, "n": 2, "ignore_eos": True}
    traced(collector, ("/v1/chat/completions", asked))
    (span,) = collector.spans
    found = collector.attributes()
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("chat fake", TRACE_ID, PARENT_ID)
    assert span.kind == span.SPAN_KIND_SERVER
    assert collector.services == {"onedraw"}
    assert (found["gen_ai.operation.name"], found["gen_ai.request.model"]) == ("chat", "fake")
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.seed"], found["gen_ai.request.max_tokens"]) == (0.5, 3, 9)
    assert (found["gen_ai.request.choice.count"], found["gen_ai.response.finish_reasons"]) == (2, ["length", "length"])
    assert (found["gen_ai.usage.output_tokens"], found["http.response.status_code"]) == (18, 200)
    assert found["gen_ai.usage.input_tokens"] > 0
    times = [found[f"gen_ai.latency.{name}"] for name in LATENCIES]
    assert all(0 <= one <= times[-1] for one in times)
    assert (span.end_time_unix_nano - span.start_time_unix_nano) * 1e-9 >= found["gen_ai.latency.time_in_model_decode"]
    assert "Hello." not in str(span)


def test_every_api_and_every_failure_has_a_span(collector: Collector) -> None:
    traced(
        collector,
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": 2}}),
        ("/v1/completions", {"prompt": "a", "temperature": -1}),
        ("/tokenize", {"prompt": "a"}),
    )
    names = [span.name for span in collector.spans]
    assert names == ["text_completion fake", "chat fake", "chat fake", "chat fake", "POST /v1/completions"]
    refused = collector.attributes(-1)
    assert (refused["http.response.status_code"], refused["error.type"]) == (400, "400")


def test_a_stream_that_fails_says_why(collector: Collector) -> None:
    traced(collector, ("/v1/completions", {"prompt": "a", "max_tokens": 500, "stream": True}), request_seconds=1e-6)
    assert collector.attributes()["error.type"] == "request_timeout"
    assert collector.spans[0].status.code == collector.spans[0].status.STATUS_CODE_ERROR


def test_nothing_is_imported_without_an_endpoint() -> None:
    program = (
        "import sys\n"
        "from onedraw.server.app import create_app\n"
        "from onedraw.server.config import ServerOptions\n"
        "from tests.server.running import fake_llm\n"
        "with fake_llm() as llm:\n"
        "    create_app(llm, ServerOptions())\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_endpoint_comes_from_opentelemetrys_variables() -> None:
    base, own = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    assert otlp_traces_endpoint({}) is None
    assert otlp_traces_endpoint({base: "http://c:4318/"}) == "http://c:4318/v1/traces"
    assert otlp_traces_endpoint({base: "http://c:4318", own: "http://d/t"}) == "http://d/t"
    assert otlp_traces_endpoint({own: "http://d/t", "OTEL_SDK_DISABLED": "true"}) is None
    assert otlp_traces_endpoint({own: "http://d/t", "OTEL_TRACES_EXPORTER": "none"}) is None
    with pytest.raises(BadSetting, match="--otlp-traces-endpoint"):
        ServerOptions(otlp_traces_endpoint="collector:4318")
