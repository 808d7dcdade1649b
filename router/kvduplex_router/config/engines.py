"""One engine as it is written: a URL with parts, or a mapping. Of a server with data-parallel ranks each may be one.

A rank has a scheduler and a KV cache of its own, so to routing it is an engine, whatever serves its HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from kvduplex_router.config.addresses import check_host, check_host_port, check_url, offset_port, ports_of
from kvduplex_router.config.sections import Section

__all__ = ["EngineConfig", "EngineEntries", "RankCount", "ranks_of"]

_RANKS_MAX: Final = 1024
_ENDPOINTS: Final = ("lease", "kv_events", "kv_replay")
_PORT_MAX: Final = 65_535

Rank = Annotated[int, Field(ge=0, lt=_RANKS_MAX)]
RankCount = Annotated[int, Field(ge=1, le=_RANKS_MAX)]


class EngineConfig(Section):
    """One engine.

    Attributes:
        url: ``http[s]://HOST:PORT``.
        name: Label in metrics and logs; ``HOST:PORT``, for a rank ``HOST:PORT@RANK``, when not given.
        lease: ``HOST:PORT`` of a decode engine's lease endpoint.
        kv_hosts: Further addresses under which this engine may name itself in transfer parameters, e.g. of its EFA
            interface. The host of `url` is always allowed.
        max_in_flight: Requests sent to it at a time; 0 is no limit.
        kv_events: ``HOST:PORT`` where it publishes KV events.
        kv_replay: ``HOST:PORT`` where it replays them.
        dp_rank: It is this data-parallel rank of the server at `url`, counted from 0 there; None when the server
            chooses ranks itself, or has one.
        dp_size: Stands for so many ranks of the server, see `ranks_of`.
        dp_start: Ranks of the deployment that other servers run before this one's first.
    """

    url: str
    name: str = Field(default="", pattern=r"^[A-Za-z0-9._:%\[\]@-]{0,255}$")
    lease: str | None = None
    kv_hosts: tuple[str, ...] = ()
    max_in_flight: int = Field(default=0, ge=0)
    kv_events: str | None = None
    kv_replay: str | None = None
    dp_rank: Rank | None = None
    dp_size: RankCount | None = None
    dp_start: Rank = 0

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        return check_url(value)

    @field_validator("lease", "kv_events", "kv_replay")
    @classmethod
    def _endpoint(cls, value: str | None) -> str | None:
        return None if value is None else check_host_port(value)

    @field_validator("kv_hosts")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_host(host) for host in value)

    @model_validator(mode="after")
    def _replay_of_something(self) -> Self:
        if self.kv_replay is not None and self.kv_events is None:
            raise ValueError(f"kv_replay '{self.kv_replay}' is given without kv_events, whose replays it would be")
        return self

    @model_validator(mode="after")
    def _ranks(self) -> Self:
        if self.dp_rank is not None and self.dp_size is not None:
            raise ValueError(
                f"dp_rank {self.dp_rank} and dp_size {self.dp_size} are both given; dp_size lists every rank of the "
                "server, dp_rank one of them"
            )
        if self.dp_start and self.dp_rank is None and self.dp_size is None:
            raise ValueError(f"dp_start {self.dp_start} is given without dp_size or dp_rank, whose first it would be")
        if self.dp_size is not None:
            _check_ports(self, self.dp_size)
        return self

    @model_validator(mode="after")
    def _default_name(self) -> Self:
        if not self.name:
            rank = "" if self.dp_rank is None else f"@{self.dp_rank}"
            object.__setattr__(self, "name", urlsplit(self.url).netloc + rank)
        return self

    @property
    def target(self) -> str:
        """What makes two entries one engine: the URL, and the rank where there is one."""
        return self.url if self.dp_rank is None else f"{self.url}#dp_rank={self.dp_rank}"


def ranks_of(entry: EngineConfig) -> tuple[EngineConfig, ...]:
    """An entry with `EngineConfig.dp_size` as one entry for each rank; others as they are.

    Ports of the lease endpoint, of events and of replays are those that the server was started with: vLLM adds to each
    the rank, counted over the whole deployment.
    """
    if entry.dp_size is None:
        return (entry,)
    named = entry.name != urlsplit(entry.url).netloc
    return tuple(_rank(entry, rank, named=named) for rank in range(entry.dp_size))


def _rank(entry: EngineConfig, rank: int, *, named: bool) -> EngineConfig:
    given = {name: value for name in _ENDPOINTS if (value := getattr(entry, name)) is not None}
    changes: dict[str, Any] = {name: offset_port(value, entry.dp_start + rank) for name, value in given.items()}
    changes |= {"dp_size": None, "dp_rank": rank, "name": f"{entry.name}@{rank}" if named else ""}
    return EngineConfig.model_validate({**entry.model_dump(), **changes})


def _check_ports(entry: EngineConfig, ranks: int) -> None:
    """Every rank has ports of its own, so ranges that meet are ports that two of them cannot both have."""
    taken: dict[str, tuple[str, range]] = {}
    for name in _ENDPOINTS:
        value = getattr(entry, name)
        if value is None:
            continue
        host, ports = ports_of(value, first=entry.dp_start, count=ranks)
        if ports[-1] > _PORT_MAX:
            raise ValueError(
                f"{name} '{value}' and one more port for each of {entry.dp_start + ranks} data-parallel ranks end "
                f"beyond {_PORT_MAX}; choose a lower one"
            )
        for other, (there, others) in taken.items():
            if host == there and set(ports) & set(others):
                raise ValueError(
                    f"{name} '{value}' and {other} meet: {ranks} data-parallel ranks have ports {ports[0]} to "
                    f"{ports[-1]} and {others[0]} to {others[-1]}; start the server with ports at least {ranks} apart"
                )
        taken[name] = (host, ports)


_FORMS: Final[Mapping[str, str]] = {
    **dict.fromkeys(_ENDPOINTS, "HOST:PORT"),
    "dp_size": "RANKS",
    "dp_rank": "RANK",
    "dp_start": "RANK",
}


def _engine_entry(value: object) -> object:
    """Accept ``URL`` and ``URL#lease=HOST:PORT&kv_events=HOST:PORT&...`` for a mapping."""
    if not isinstance(value, str):
        return value
    url, _, fragment = value.partition("#")
    entry = {"url": url}
    for part in fragment.split("&") if fragment else ():
        key, _, given = part.partition("=")
        if key not in _FORMS or not given or key in entry:
            allowed = "&".join(f"{name}={form}" for name, form in _FORMS.items())
            raise ValueError(f"fragment '{part}' is not understood; allowed are parts of #{allowed}, each once")
        entry[key] = given
    return entry


def _each_rank(entries: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
    return tuple(rank for entry in entries for rank in ranks_of(entry))


EngineEntries = Annotated[
    tuple[Annotated[EngineConfig, BeforeValidator(_engine_entry)], ...], AfterValidator(_each_rank)
]
"""A list of engines as people write it; what comes out has an entry for each rank."""
