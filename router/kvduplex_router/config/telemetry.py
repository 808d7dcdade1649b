"""What the router tells about itself beyond metrics."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from kvduplex_router.config.addresses import split_url
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
        split_url(value, "http://HOST:4318")
        return value.rstrip("/")
