"""Where engines are looked for while the router runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from kvduplex_router.config.sections import Seconds, Section

__all__ = ["DiscoveryConfig", "DnsSource", "Ec2Source", "EngineGroup"]

Port = Annotated[int, Field(ge=1, le=65_535)]
_EC2_KEYS: Final = ("role", "region", "http_port", "lease_port", "scheme")


class EngineGroup(StrEnum):
    """What the engines that a source finds do."""

    PREFILL = "prefill"
    DECODE = "decode"
    REPLICA = "replica"


class DnsSource(Section):
    """A name whose every address is an engine.

    Attributes:
        name: Host name, e.g. of a headless service.
        port: HTTP port of the engines.
        role: What they do.
        lease_port: Port of decode engines' lease endpoint; none when not given.
        scheme: ``http`` or ``https``.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,253}$")
    port: Port
    role: EngineGroup
    lease_port: Port | None = None
    scheme: Literal["http", "https"] = "http"


class Ec2Source(Section):
    """Running EC2 instances with certain tags, or those in service in an Auto Scaling group.

    Attributes:
        tags: Tags and their values, all of which an instance must carry.
        group: Name of an Auto Scaling group.
        role: What the engines do; read from the instance's tag ``kvduplex:role`` when not given.
        region: AWS region; the environment's when not given.
        http_port: Of the engines; tag ``kvduplex:http-port`` overrides it. By role 8100, 8200, 8000.
        lease_port: Of decode engines; tag ``kvduplex:lease-port`` overrides it, ``0`` is none. 5900 when not given.
        scheme: ``http`` or ``https``.
    """

    tags: dict[str, str] = Field(default_factory=dict)
    group: str | None = None
    role: EngineGroup | None = None
    region: str | None = None
    http_port: Port | None = None
    lease_port: int | None = Field(default=None, ge=0, le=65_535)
    scheme: Literal["http", "https"] = "http"

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.tags and self.group is None:
            raise ValueError(
                "give tags or group (the name of an Auto Scaling group); without, every instance would be taken"
            )
        return self


def _dns_entry(value: object) -> object:
    """Accept ``NAME:PORT=ROLE`` where a mapping is expected."""
    if not isinstance(value, str):
        return value
    address, _, role = value.rpartition("=")
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit():
        raise ValueError(f"'{value}' is not NAME:PORT=ROLE, e.g. decode.engines.internal:8200=decode")
    return {"name": name, "port": int(port), "role": role}


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
