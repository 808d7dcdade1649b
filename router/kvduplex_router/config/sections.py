"""The sections of the configuration, one model each; plain validated data."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvduplex_router.config.addresses import check_host_port

__all__ = [
    "AdminConfig",
    "AuthConfig",
    "BreakerConfig",
    "ConversationConfig",
    "HealthConfig",
    "LimitConfig",
    "OnNoPrefill",
    "Reuse",
    "Section",
    "TimeoutConfig",
    "TlsConfig",
]


class Reuse(StrEnum):
    """How the next turn reaches the KV that the decode engine holds."""

    AUTO = "auto"
    LEASED = "leased"
    STOCK = "stock"
    OFF = "off"

    @classmethod
    def _missing_(cls, value: object) -> Reuse | None:
        """YAML reads a bare ``off`` as false."""
        return cls.OFF if value is False else None


class OnNoPrefill(StrEnum):
    """What happens to a turn when no prefill engine is usable."""

    FAIL = "fail"
    DECODE_ONLY = "decode_only"


class Section(BaseModel):
    """Unknown keys are refused, and nothing changes after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse ``yes`` and ``no``, which would count as 1 and 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and bool not in kinds and not {int, float}.isdisjoint(kinds):
            raise ValueError(f"a number is expected here, got {'yes' if value else 'no'}")
        return value


Seconds = Annotated[float, Field(gt=0, le=86_400)]


class LimitConfig(Section):
    """Bounds on what one client can make the router hold.

    Attributes:
        body_bytes: Request body.
        frame_bytes: One server-sent event from an engine.
        answer_bytes: A whole answer that is not streamed.
        queued: Requests that may wait for an engine with a free place.
        queue_s: How long one waits.
    """

    body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    frame_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    answer_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    queued: int = Field(default=256, ge=0)
    queue_s: Seconds = 30.0


class TimeoutConfig(Section):
    """Silence limits, in seconds; no limit on the length of a turn.

    Attributes:
        connect_s: Until a connection to an engine is up.
        first_byte_s: From a request to the engine's response head.
        idle_s: Between parts of an engine's answer.
        keep_alive_s: Age at which an unused engine connection is retired; engines close theirs after 5 s.
        header_s: For a client to complete its request head.
        upload_s: For a client to send its body.
        client_write_s: For a client to read on.
        shutdown_s: For turns in flight when the router is told to stop.
    """

    connect_s: Seconds = 3.0
    first_byte_s: Seconds = 600.0
    idle_s: Seconds = 300.0
    keep_alive_s: Annotated[float, Field(gt=0, lt=5)] = 4.0
    header_s: Seconds = 10.0
    upload_s: Seconds = 60.0
    client_write_s: Seconds = 300.0
    shutdown_s: Seconds = 8.0


class ConversationConfig(Section):
    """What is remembered between turns, and for how long.

    Attributes:
        recognise: Recognise conversations by their history when the client sends no id.
        max_count: References kept.
        max_bytes: Bytes of references kept, estimated.
        decoder_kv_blocks_ttl_s: What the decode engines run with; upstream's default.
        reference_ttl_s: Age at which a stock reference is no longer used; below `decoder_kv_blocks_ttl_s`, and 15/16 of
            it when not given.
        lease_ttl_s: Seconds a lease lives from its last renewal.
        keep_s: Seconds a lease is renewed after a turn, per turn the conversation has had.
        keep_max_s: Upper bound of that.
        prefill_ttl_s: Seconds after which a prefill engine may have freed the blocks of its answer.
    """

    recognise: bool = True
    max_count: int = Field(default=65_536, ge=1)
    max_bytes: int = Field(default=40 * 1024 * 1024, ge=65_536)
    decoder_kv_blocks_ttl_s: Seconds = 480.0
    reference_ttl_s: Seconds | None = None
    lease_ttl_s: Annotated[float, Field(ge=1, le=3600)] = 30.0
    keep_s: Seconds = 60.0
    keep_max_s: Seconds = 480.0
    prefill_ttl_s: Seconds = 25.0

    @model_validator(mode="after")
    def _below_the_engines(self) -> Self:
        if self.usable_s >= self.decoder_kv_blocks_ttl_s:
            raise ValueError(
                f"reference_ttl_s {self.usable_s:g} must be below decoder_kv_blocks_ttl_s "
                f"{self.decoder_kv_blocks_ttl_s:g}: the engine frees the blocks by then"
            )
        return self

    @property
    def usable_s(self) -> float:
        """Age in seconds at which a stock reference is no longer used."""
        return self.decoder_kv_blocks_ttl_s * 15 / 16 if self.reference_ttl_s is None else self.reference_ttl_s


class HealthConfig(Section):
    """Probing of the engines' ``/health``.

    Attributes:
        interval_s: Between probes of one engine.
        timeout_s: For one probe.
        down_after: Failed probes in a row after which an engine is not picked.
        up_after: Good probes in a row after which it is picked again.
    """

    interval_s: Seconds = 2.0
    timeout_s: Seconds = 2.0
    down_after: int = Field(default=3, ge=1)
    up_after: int = Field(default=1, ge=1)


class BreakerConfig(Section):
    """When an engine that answers its probes but fails its requests is left alone.

    Attributes:
        failures: Own faults in a row that open the breaker.
        open_s: Seconds until one request is let through to try again.
    """

    failures: int = Field(default=5, ge=1)
    open_s: Seconds = 10.0


class AuthConfig(Section):
    """Who may call, and how the router calls engines. Keys are read from files or the environment, never from here.

    Attributes:
        keys_file: YAML list of ``{key | sha256, tenant, requests_per_minute}``.
        keys_env: Environment variable with comma-separated keys.
        engine_key_env: Environment variable with the engines' API key.
        forward_authorization: Pass the client's Authorization header on to engines.
    """

    keys_file: Path | None = None
    keys_env: str | None = None
    engine_key_env: str | None = None
    forward_authorization: bool = False


class AdminConfig(Section):
    """Operators' endpoints, off unless a key is set.

    Attributes:
        key_env: Environment variable with the admin key.
        listen: Own ``HOST:PORT`` for ``/admin/*`` and ``/metrics``; on the main listener when not given.
    """

    key_env: str | None = None
    listen: str | None = None

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str | None) -> str | None:
        return None if value is None else check_host_port(value)


class TlsConfig(Section):
    """TLS to engines with ``https`` URLs.

    Attributes:
        ca_file: Certificates that engines are checked against; the system's when not given.
        cert_file: The router's own certificate, for engines that ask for one.
        key_file: Its key.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @model_validator(mode="after")
    def _key_of_something(self) -> Self:
        if self.key_file is not None and self.cert_file is None:
            raise ValueError(f"key_file '{self.key_file}' is given without cert_file, whose key it would be")
        return self
