"""The router's configuration: `build_config` merges a YAML file with flags and is what every entry point calls."""

from __future__ import annotations

from kvduplex_router.config.build import build_config
from kvduplex_router.config.discovery import DiscoveryConfig, DnsSource, Ec2Source, EngineGroup
from kvduplex_router.config.engines import EngineConfig, EngineEntries, ranks_of
from kvduplex_router.config.router import RouterConfig
from kvduplex_router.config.routing import (
    ClassConfig,
    EventsConfig,
    MatchConfig,
    Plan,
    Policy,
    RoutingConfig,
    WeightsConfig,
)
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

__all__ = [
    "AdminConfig",
    "AuthConfig",
    "BreakerConfig",
    "ClassConfig",
    "ConversationConfig",
    "DiscoveryConfig",
    "DnsSource",
    "Ec2Source",
    "EngineConfig",
    "EngineEntries",
    "EngineGroup",
    "EventsConfig",
    "HealthConfig",
    "LimitConfig",
    "MatchConfig",
    "OnNoPrefill",
    "Plan",
    "Policy",
    "Reuse",
    "RouterConfig",
    "RoutingConfig",
    "Section",
    "StateConfig",
    "TelemetryConfig",
    "TimeoutConfig",
    "TlsConfig",
    "WeightsConfig",
    "build_config",
    "ranks_of",
]
