"""OpenTelemetry traces: one span a turn, one below it for each hop; engines' own spans hang below those.

The packages are imported when tracing is switched on and not before. Spans carry plan, outcome, token counts and
engines' names, never text. They are sent in the background and dropped when the collector cannot keep up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from kvduplex_router.config import TelemetryConfig
from kvduplex_router.errors import ConfigError
from kvduplex_router.http.request import forwardable

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Tracing", "TurnTrace", "open_tracing"]

_CONTEXT: Final = (b"traceparent", b"tracestate")
_EXPORT_S: Final = 2


class HopTrace(AbstractContextManager[bytes]):
    """A hop's span while it is entered; gives the header lines that hand it on to the engine."""

    def __init__(self, tracing: Tracing, parent: Any, name: str, engine: str, headers: bytes) -> None:
        self._headers = headers
        self._span: Span = tracing.start(name, parent, client=True)
        self._span.set_attribute("kvduplex.engine", engine)
        self._tracing = tracing

    def __enter__(self) -> bytes:
        """The header lines and those of the span's context."""
        return self._headers + self._tracing.lines(self._span)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it; an error's kind is kept, its message is not."""
        if kind is not None:
            self._tracing.failed(self._span, getattr(error, "reason", None) or kind.__name__)
        self._span.end()


class TurnTrace:
    """A turn's span."""

    def __init__(self, tracing: Tracing, headers: Mapping[bytes, bytes], api: str) -> None:
        self._tracing = tracing
        self._span = tracing.start(f"turn {api}", tracing.parent(headers), client=False)
        self._context = tracing.below(self._span)

    def hop(self, name: str, engine: str, headers: bytes) -> HopTrace:
        """A span below it for one request to an engine, which carries `headers` too."""
        return HopTrace(self._tracing, self._context, name, engine, headers)

    def end(self, outcome: str, **attributes: str | int | None) -> None:
        """The turn is over."""
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(f"kvduplex.{name}", value)
        self._span.set_attribute("kvduplex.outcome", outcome)
        if outcome not in ("ok", "client_gone"):
            self._tracing.failed(self._span, outcome)
        self._span.end()


class Tracing:
    """Spans and their context.

    Args:
        config: With an endpoint.

    Raises:
        ConfigError: The packages are not installed.
    """

    def __init__(self, config: TelemetryConfig) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415 - only when it is switched on
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415
        except ImportError:
            raise ConfigError(
                "telemetry.otlp_endpoint: needs OpenTelemetry; pip install 'kvduplex[router,tracing]'"
            ) from None
        resource = Resource.create({"service.name": config.service_name})
        self._provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)), resource=resource)
        exporter = OTLPSpanExporter(endpoint=f"{config.otlp_endpoint}/v1/traces", timeout=_EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvduplex.router")
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()

    def turn(self, headers: Mapping[bytes, bytes], api: str) -> TurnTrace:
        """Begin a turn's span, below the client's when it sent one."""
        return TurnTrace(self, headers, api)

    def parent(self, headers: Mapping[bytes, bytes]) -> Any:
        """The client's context."""
        carrier = {name.decode(): headers[name].decode("latin-1") for name in _CONTEXT if name in headers}
        return self._propagator.extract(carrier)

    def start(self, name: str, context: Any, *, client: bool) -> Span:
        """A span below `context`."""
        kind = self._trace.SpanKind.CLIENT if client else self._trace.SpanKind.SERVER
        return self._tracer.start_span(name, context=context, kind=kind)

    def below(self, span: Span) -> Any:
        """Context for spans below one."""
        return self._trace.set_span_in_context(span)

    def lines(self, span: Span) -> bytes:
        """Header lines with a span's context."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.below(span))
        return forwardable((name.encode(), value.encode("latin-1")) for name, value in carrier.items())

    def failed(self, span: Span, reason: str) -> None:
        """Mark a span."""
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, reason))

    async def close(self) -> None:
        """Send what is left, and end."""
        await asyncio.to_thread(self._provider.shutdown)


def open_tracing(config: TelemetryConfig) -> Tracing | None:
    """Tracing as configured; None when it is off."""
    return None if config.otlp_endpoint is None else Tracing(config)
