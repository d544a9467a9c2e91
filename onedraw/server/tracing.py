"""OpenTelemetry traces: one span for each request that generates, sent to a collector over OTLP/HTTP.

The attributes are those of the GenAI semantic conventions, and for latencies the names that vLLM uses. No text of prompts or
replies is part of a span. OpenTelemetry's packages are imported only if an endpoint is configured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onedraw import __version__
from onedraw.errors import BadSetting, OnedrawError
from onedraw.server.metrics import RequestTimer
from onedraw.server.prompts import PreparedRequest
from onedraw.types import Finish, ModelCard, Usage

if TYPE_CHECKING:
    from opentelemetry.trace import Span

TRACE = "onedraw.trace"  # the entry of the ASGI scope with the request's RequestTrace
# The paths of requests that generate a reply.
TRACED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"})
Attribute = str | int | float | bool | Sequence[str]


class RequestTrace:
    """The span of one request. If there is no span, as on a server that traces nothing, the methods do nothing."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span
        self._failed = False

    def describe(self, prepared: PreparedRequest, card: ModelCard) -> None:
        """Set the attributes that are known before the first token."""
        generation = prepared.generations[0]
        params, operation = generation.params, "chat" if prepared.kind == "chat" else "text_completion"
        self._set(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "onedraw",
                "gen_ai.request.model": card.name,
                "gen_ai.response.model": card.name,
                "gen_ai.response.id": prepared.id,
                "gen_ai.request.choice.count": prepared.n,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.top_k": params.top_k,
                "gen_ai.request.frequency_penalty": params.frequency_penalty,
                "gen_ai.request.presence_penalty": params.presence_penalty,
                "gen_ai.request.seed": params.seed,
                "gen_ai.usage.input_tokens": sum(len(one.prompt) for one in prepared.generations),
            }
        )
        if self._span is not None:
            self._span.update_name(f"{operation} {card.name}")

    def finish(self, usage: Usage, finishes: Sequence[Finish], timer: RequestTimer) -> None:
        """Set the attributes of a complete reply. Of several choices, the longest times count."""
        times = timer.choices
        self._set(
            {
                "gen_ai.response.finish_reasons": list(finishes),
                "gen_ai.usage.output_tokens": usage.completion,
                "gen_ai.usage.cache_read.input_tokens": usage.cached,
                "gen_ai.usage.reasoning.output_tokens": usage.reasoning,
                "onedraw.usage.drafts_kept": usage.kept,
                "onedraw.usage.drafts_rejected": usage.rejected,
                "gen_ai.latency.time_in_queue": max((one.queue for one in times), default=0.0),
                "gen_ai.latency.time_in_model_prefill": max((one.prefill for one in times), default=0.0),
                "gen_ai.latency.time_in_model_decode": max((one.decode for one in times), default=0.0),
                "gen_ai.latency.time_to_first_token": max((one.first_token for one in times), default=0.0),
                "gen_ai.latency.e2e": max((one.whole for one in times), default=0.0),
            }
        )

    def fail(self, error: BaseException) -> None:
        """Note why no complete reply was sent. Anything but an OnedrawError counts as "cancelled": the client is gone."""
        self._failed = True
        self._set({"error.type": error.code if isinstance(error, OnedrawError) else "cancelled"})

    def end(self, status: int | None) -> None:
        """End the span. `status` is the HTTP status, or None if the client was gone before there was one."""
        if self._span is None:
            return
        if status is not None:
            self._set({"http.response.status_code": status})
            if status >= 400 and not self._failed:
                self.fail(OnedrawError("", code=str(status)))
        if self._failed:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _set(self, attributes: Mapping[str, Attribute]) -> None:
        if self._span is not None:
            self._span.set_attributes(dict(attributes))


def trace_of(scope: Scope) -> RequestTrace:
    found: RequestTrace = scope.get(TRACE) or RequestTrace()
    return found


class Tracing:
    """Makes the spans of one server, and sends them from a thread of the SDK. The SDK reads its own variables from the
    environment, such as OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise BadSetting(
                f"--otlp-traces-endpoint needs OpenTelemetry, and {error.name} is missing: pip install 'onedraw[otel]'"
            ) from None
        resource = Resource.create()
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "onedraw"}))
        self._provider = TracerProvider(resource=resource.merge(Resource({"service.version": __version__})))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("onedraw", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> RequestTrace:
        """Start the span of a request. A `traceparent` header makes it part of the caller's trace."""
        from opentelemetry.trace import SpanKind

        headers = {name: value for name, value in Headers(scope=scope).items() if name in ("traceparent", "tracestate")}
        attributes: dict[str, Any] = {"http.request.method": scope["method"], "url.path": scope["path"]}
        parent = self._propagator.extract(headers)
        name = f"{scope['method']} {scope['path']}"
        return RequestTrace(self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER, attributes=attributes))

    def close(self) -> None:
        """Send the spans that are left."""
        self._provider.shutdown()


class TracingMiddleware:
    """Gives every request that generates a span, which ends when its response has been sent."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in TRACED:
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        trace = scope[TRACE] = self._tracing.begin(scope)
        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            trace.end(status)
