"""The whole configuration, and what must hold between its parts."""

from __future__ import annotations

from collections import Counter
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from kvduplex_router.config.addresses import check_host_port
from kvduplex_router.config.discovery import DiscoveryConfig
from kvduplex_router.config.engines import EngineConfig, EngineEntries
from kvduplex_router.config.routing import RoutingConfig
from kvduplex_router.config.sections import (
    AdminConfig,
    AuthConfig,
    BreakerConfig,
    ConversationConfig,
    HealthConfig,
    LimitConfig,
    OnNoPrefill,
    Reuse,
    Section,
    TimeoutConfig,
    TlsConfig,
)
from kvduplex_router.config.state import StateConfig
from kvduplex_router.config.telemetry import TelemetryConfig

__all__ = ["RouterConfig"]


class RouterConfig(Section):
    """Everything a router needs to start.

    Attributes:
        listen: ``HOST:PORT`` to serve on.
        prefill: Prefill engines.
        decode: Decode engines.
        engines: Plain replicas that do whole requests; not together with `prefill` and `decode`.
        reuse: How the next turn reaches a decode engine's KV.
        on_no_prefill: Policy when no prefill engine is usable.
        retries: Further attempts at a turn of which nothing was consumed.
        forced_output_on_prefill: Keep ``tool_choice`` and ``response_format`` on the prefill hop, for models whose
            chat template renders them.
        workers: Processes that serve the listening socket.
    """

    listen: str = "127.0.0.1:8000"
    prefill: EngineEntries = ()
    decode: EngineEntries = ()
    engines: EngineEntries = ()
    reuse: Reuse = Reuse.AUTO
    on_no_prefill: OnNoPrefill = OnNoPrefill.FAIL
    retries: int = Field(default=1, ge=0, le=5)
    forced_output_on_prefill: bool = False
    workers: int = Field(default=1, ge=1, le=64)
    limits: LimitConfig = LimitConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    conversations: ConversationConfig = ConversationConfig()
    health: HealthConfig = HealthConfig()
    breaker: BreakerConfig = BreakerConfig()
    auth: AuthConfig = AuthConfig()
    admin: AdminConfig = AdminConfig()
    tls: TlsConfig = TlsConfig()
    state: StateConfig = StateConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    routing: RoutingConfig = RoutingConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        return check_host_port(value)

    @model_validator(mode="after")
    def _fleet(self) -> Self:
        _check_roles(self)
        _check_duplicates(self)
        _check_reuse(self)
        return self


def _check_roles(config: RouterConfig) -> None:
    disaggregated = bool(config.prefill or config.decode)
    if disaggregated and config.engines:
        raise ValueError("engines: give either prefill and decode engines or plain engines, not both")
    if config.discovery.enabled:
        return
    if disaggregated and not config.prefill:
        raise ValueError("prefill: decode engines need at least one prefill engine (--prefill URL)")
    if disaggregated and not config.decode:
        raise ValueError("decode: prefill engines need at least one decode engine (--decode URL)")
    if not disaggregated and not config.engines:
        raise ValueError(
            "prefill: no engine given; use --prefill URL and --decode URL, --engine URL, or --engines-file FILE"
        )


def _check_duplicates(config: RouterConfig) -> None:
    everything = [*config.prefill, *config.decode, *config.engines]
    for field, values in (("url", map(_canonical, everything)), ("name", (engine.name for engine in everything))):
        for value, count in Counter(values).items():
            if count > 1:
                raise ValueError(f"{field}: '{value}' is given {count} times; every engine is listed once")
    ranked = {_canonical_url(engine) for engine in everything if engine.dp_rank is not None}
    for engine in everything:
        if engine.dp_rank is None and _canonical_url(engine) in ranked:
            raise ValueError(f"url: '{engine.url}' is given by data-parallel rank and as one engine; keep one of both")


def _canonical(engine: EngineConfig) -> str:
    """What makes two entries one engine, in the one spelling that all of its spellings share."""
    return _canonical_url(engine) + engine.target.removeprefix(engine.url)


def _canonical_url(engine: EngineConfig) -> str:
    parts = urlsplit(engine.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _check_reuse(config: RouterConfig) -> None:
    missing = [engine.name for engine in config.decode if engine.lease is None]
    if config.reuse is Reuse.LEASED and (missing or not (config.decode or config.discovery.enabled)):
        who = f"decode engine '{missing[0]}' has" if missing else "there is no decode engine that has"
        raise ValueError(f"reuse: 'leased' but {who} no lease endpoint; write --decode URL#lease=HOST:PORT")
