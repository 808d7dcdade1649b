"""Where engines are looked for while the router runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from kvduplex_router.config.engines import EngineConfig, RankCount, ranks_of
from kvduplex_router.config.sections import Seconds, Section

__all__ = ["DiscoveryConfig", "DnsSource", "Ec2Source", "EngineGroup", "FoundEngines"]

Port = Annotated[int, Field(ge=1, le=65_535)]
_EC2_KEYS: Final = (
    "role", "region", "http_port", "lease_port", "scheme", "kv_events_port", "kv_replay_port", "dp_size",
)  # fmt: skip


class EngineGroup(StrEnum):
    """What the engines that a source finds do."""

    PREFILL = "prefill"
    DECODE = "decode"
    REPLICA = "replica"


class FoundEngines(Section):
    """What a source cannot find out about its engines; all of them have it in common.

    Attributes:
        scheme: ``http`` or ``https``.
        kv_events_port: Port where they publish KV events; none when not given.
        kv_replay_port: Port where they replay them.
        dp_size: Data-parallel ranks of every server, each of which is an engine; ports are those of its first rank.
    """

    scheme: Literal["http", "https"] = "http"
    kv_events_port: Port | None = None
    kv_replay_port: Port | None = None
    dp_size: RankCount | None = None

    def at(
        self, host: str, port: int | str, *, lease_port: int | str | None, ranks: int | str | None = None
    ) -> tuple[EngineConfig, ...]:
        """The engines of the server at an address, IPv6 in brackets; `ranks` go before `dp_size`.

        Raises:
            ValidationError: A port or the number of ranks is none.
        """
        ports = {"lease": lease_port, "kv_events": self.kv_events_port, "kv_replay": self.kv_replay_port}
        endpoints = {name: f"{host}:{number}" for name, number in ports.items() if number is not None}
        given = {"url": f"{self.scheme}://{host}:{port}", "dp_size": ranks or self.dp_size, **endpoints}
        return ranks_of(EngineConfig.model_validate(given))

    def _check(self, *, lease_port: int | None) -> None:
        """Find out at the start what `at` would refuse of every engine."""
        try:
            self.at("host", 1, lease_port=lease_port)
        except ValidationError as error:
            raise ValueError(error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")) from None


class DnsSource(FoundEngines):
    """A name whose every address, or every SRV record, is a server of engines.

    Attributes:
        name: Host name, e.g. of a headless service.
        port: HTTP port of the engines at the name's addresses.
        srv: Take hosts and HTTP ports from SRV records instead.
        role: What they do.
        lease_port: Port of decode engines' lease endpoint; none when not given.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,253}$")
    port: Port | None = None
    srv: bool = False
    role: EngineGroup
    lease_port: Port | None = None

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.srv == (self.port is not None):
            what = f"port {self.port} and srv are both given" if self.srv else "neither port nor srv is given"
            raise ValueError(f"{what}; give port, or srv: true for hosts and ports of the name's SRV records")
        self._check(lease_port=self.lease_port)
        return self


class Ec2Source(FoundEngines):
    """Running EC2 instances with certain tags, or those in service in an Auto Scaling group.

    Attributes:
        tags: Tags and their values, all of which an instance must carry.
        group: Name of an Auto Scaling group.
        role: What the engines do; read from the instance's tag ``kvduplex:role`` when not given.
        region: AWS region; the environment's when not given.
        http_port: Of the engines; tag ``kvduplex:http-port`` overrides it. By role 8100, 8200, 8000.
        lease_port: Of decode engines; tag ``kvduplex:lease-port`` overrides it, ``0`` is none. 5900 when not given.
        dp_size: See `FoundEngines`; tag ``kvduplex:dp-size`` overrides it.
    """

    tags: dict[str, str] = Field(default_factory=dict)
    group: str | None = None
    role: EngineGroup | None = None
    region: str | None = None
    http_port: Port | None = None
    lease_port: int | None = Field(default=None, ge=0, le=65_535)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.tags and self.group is None:
            raise ValueError(
                "give tags or group (the name of an Auto Scaling group); without, every instance would be taken"
            )
        self._check(lease_port=self.lease_port or None)
        return self


def _dns_entry(value: object) -> object:
    """Accept ``NAME:PORT=ROLE`` and ``NAME:srv=ROLE`` where a mapping is expected."""
    if not isinstance(value, str):
        return value
    address, _, role = value.rpartition("=")
    name, _, port = address.rpartition(":")
    if not name or not (port.isdecimal() or port == "srv"):
        raise ValueError(f"'{value}' is not NAME:PORT=ROLE, e.g. decode.engines.internal:8200=decode, or NAME:srv=ROLE")
    return {"name": name, "role": role, **({"srv": True} if port == "srv" else {"port": int(port)})}


def _ec2_entry(value: object) -> object:
    """Accept ``tag:KEY=VALUE,asg:NAME,role=ROLE,...`` where a mapping is expected."""
    if not isinstance(value, str):
        return value
    entry: dict[str, Any] = {"tags": {}}
    for part in value.split(","):
        key, _, given = part.strip().partition("=")
        if key.startswith("tag:") and given:
            entry["tags"][key.removeprefix("tag:")] = given
        elif key.startswith("asg:") and not given:
            entry["group"] = key.removeprefix("asg:")
        elif key in _EC2_KEYS and given:
            entry[key] = given
        else:
            raise ValueError(f"'{part}' is not tag:KEY=VALUE, asg:NAME or one of {', '.join(_EC2_KEYS)} with =VALUE")
    return entry


class DiscoveryConfig(Section):
    """Sources of engines beside the configuration itself; an engine that several list is one engine.

    Attributes:
        file: YAML or JSON with ``prefill``, ``decode`` and ``engines`` as here, read again when it changes.
        dns: Names to resolve.
        ec2: Instances to look for.
        file_interval_s: Between looks at the file.
        dns_interval_s: Between resolutions.
        ec2_interval_s: Between calls to EC2.
        timeout_s: For one look.
        missing_after: Looks in a row, of DNS and EC2, that must not find an engine before it is let go.
    """

    file: Path | None = None
    dns: tuple[Annotated[DnsSource, BeforeValidator(_dns_entry)], ...] = ()
    ec2: tuple[Annotated[Ec2Source, BeforeValidator(_ec2_entry)], ...] = ()
    file_interval_s: Seconds = 1.0
    dns_interval_s: Seconds = 5.0
    ec2_interval_s: Seconds = 15.0
    timeout_s: Seconds = 10.0
    missing_after: int = Field(default=2, ge=1, le=100)

    @property
    def enabled(self) -> bool:
        """Whether there is a source."""
        return self.file is not None or bool(self.dns) or bool(self.ec2)
