"""What the router tells about itself beyond metrics."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kvduplex_router.config.sections import Section

__all__ = ["TelemetryConfig"]


class TelemetryConfig(Section):
    """OpenTelemetry traces; none without an endpoint.

    Attributes:
        otlp_endpoint: Collector's base URL for OTLP over HTTP, e.g. ``http://127.0.0.1:4318``.
        service_name: Under which spans appear.
        sample_ratio: Share of turns traced that come without a trace of their own; those with one follow its decision.
    """

    otlp_endpoint: str | None = None
    service_name: str = Field(default="kvduplex-router", min_length=1, max_length=255)
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError(f"'{value}' is not a URL of the form http://HOST:4318")
        return value.rstrip("/")
