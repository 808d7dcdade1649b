"""Who belongs to the fleet: what every source of engines says, put together and carried out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from kvduplex_router.config import EngineConfig, RouterConfig
from kvduplex_router.fleet.engine import EngineHealth, EngineRole
from kvduplex_router.fleet.fleet import EngineMaker, Fleet

__all__ = ["ADMIN", "CONFIG", "FleetTarget", "Member", "Members", "Refused", "Roster", "Target", "configured"]

_log = logging.getLogger("kvduplex.router.fleet")
CONFIG: Final = "config"
ADMIN: Final = "admin"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One engine as a source lists it.

    Attributes:
        role: What it does.
        entry: `EngineConfig` as JSON, so that processes can tell each other.
        leaving: It is about to end: nothing new is sent there, but its KV can still be read.
    """

    role: EngineRole
    entry: str
    leaving: bool = False

    @classmethod
    def of(cls, role: EngineRole, entry: EngineConfig, *, leaving: bool = False) -> Member:
        """Make one."""
        return cls(role, entry.model_dump_json(exclude_defaults=True), leaving)

    @property
    def config(self) -> EngineConfig:
        """The entry."""
        return EngineConfig.model_validate_json(self.entry)


class Refused(msgspec.Struct, frozen=True):
    """An engine that a source lists and the fleet does not take."""

    source: str
    url: str
    reason: str


class Roster(msgspec.Struct, frozen=True, array_like=True):
    """Everything `Members` knows, for another process.

    Attributes:
        sources: Members by source; of two sources that list one engine the first counts.
        hidden: Names that an operator took out, whoever lists them.
        errors: Why a source cannot be read now, by source.
    """

    sources: dict[str, list[Member]]
    hidden: list[str]
    errors: dict[str, str]


class Target(Protocol):
    """What is made to agree with the members."""

    def join(self, source: str, member: Member) -> None:
        """A member came."""

    def leave(self, name: str) -> None:
        """One left."""

    def mark(self, name: str, *, leaving: bool) -> None:
        """One is about to leave, or stays after all."""


class Members:
    """See the module.

    Args:
        target: Made to agree.
        check: Why a member cannot be taken; None when it can.

    Attributes:
        refused: What is listed and not taken.
        errors: Why a source cannot be read now, by source.
        on_change: Called after every change.
    """

    def __init__(self, target: Target, *, check: Callable[[Member], str | None]) -> None:
        self._target = target
        self._check = check
        self.on_change: Callable[[], None] = lambda: None
        self._sources: dict[str, list[Member]] = {ADMIN: [], CONFIG: []}
        self._hidden: set[str] = set()
        self._present: dict[str, Member] = {}
        self.refused: list[Refused] = []
        self.errors: dict[str, str] = {}

    @property
    def roster(self) -> Roster:
        """What there is to know."""
        sources = {name: list(members) for name, members in self._sources.items()}
        return Roster(sources, sorted(self._hidden), dict(self.errors))

    def families(self) -> Iterator[tuple[str, str, str, tuple[str, ...], Iterable[tuple[tuple[str, ...], float]]]]:
        """For metrics, see `kvduplex_router.telemetry.families`."""
        failing = "1 while a source of engines cannot be read."
        samples = [((name,), float(name in self.errors)) for name in sorted({*self._sources, *self.errors})]
        yield "gauge", "discovery_failing", failing, ("source",), samples

    def replace(self, roster: Roster) -> None:
        """Take over what another process knows."""
        self._sources = {name: list(members) for name, members in roster.sources.items()}
        self._hidden = set(roster.hidden)
        self.errors = dict(roster.errors)
        self._settle()

    def note(self, source: str, error: str | None) -> None:
        """A source cannot be read, or can again."""
        self.errors.pop(source, None)
        if error is not None:
            self.errors[source] = error
        self.on_change()

    def update(self, source: str, members: Iterable[Member]) -> None:
        """A source lists exactly these now."""
        self._sources[source] = list(members)
        self._settle()

    def admit(self, member: Member) -> str | None:
        """An operator adds an engine or changes one, whoever lists it; returns why it cannot be taken, or None."""
        entry = member.config
        others = {name: (source, each) for name, (source, each) in self._wanted()[0].items() if name != entry.name}
        ranked = {each.config.url: each.config.dp_rank is not None for _, each in others.values()}
        reason = self._check(member) or _clash(member, entry, others, ranked)
        if reason is not None:
            return reason
        kept = [m for m in self._sources[ADMIN] if entry.name != m.config.name and entry.target != m.config.target]
        self._sources[ADMIN] = [*kept, member]
        self._hidden.discard(entry.name)
        self._settle()
        return None

    def dismiss(self, name: str) -> bool:
        """An operator takes an engine out, whoever lists it; False when there is none of that name."""
        if name not in self._present:
            return False
        self._sources[ADMIN] = [member for member in self._sources[ADMIN] if member.config.name != name]
        self._hidden.add(name)
        self._settle()
        return True

    def _settle(self) -> None:
        wanted, refused = self._wanted()
        for each in refused:
            if each not in self.refused:
                _log.error("engine %s, listed by %s, is not taken: %s", each.url, each.source, each.reason)
        self.refused = refused
        for name, member in list(self._present.items()):
            new = wanted.get(name)
            if new is None or new[1].entry != member.entry or new[1].role is not member.role:
                del self._present[name]
                self._target.leave(name)
        for name, (source, member) in wanted.items():
            before = self._present.get(name)
            if before is None:
                self._target.join(source, member)
            if member.leaving != (before is not None and before.leaving):
                self._target.mark(name, leaving=member.leaving)
            self._present[name] = member
        self.on_change()

    def _wanted(self) -> tuple[Mapping[str, tuple[str, Member]], list[Refused]]:
        wanted: dict[str, tuple[str, Member]] = {}
        targets: set[str] = set()
        ranked: dict[str, bool] = {}
        refused: list[Refused] = []
        for source, members in self._sources.items():
            for member in members:
                entry = member.config
                if entry.target in targets or (entry.name in self._hidden and source != ADMIN):
                    continue
                reason = self._check(member) or _clash(member, entry, wanted, ranked)
                if reason is None:
                    targets.add(entry.target)
                    ranked[entry.url] = entry.dp_rank is not None
                    wanted[entry.name] = (source, member)
                else:
                    refused.append(Refused(source, entry.target, reason))
        return wanted, refused


def _clash(
    member: Member, entry: EngineConfig, wanted: Mapping[str, tuple[str, Member]], ranked: Mapping[str, bool]
) -> str | None:
    """Why an entry does not fit beside those before it; `ranked` says of their URLs whether they name ranks."""
    if entry.name in wanted:
        return f"another engine is named '{entry.name}'; names are unique in a fleet"
    if ranked.get(entry.url, entry.dp_rank is not None) != (entry.dp_rank is not None):
        return "its server is listed by data-parallel rank and as one engine; keep one of both (dp_size, or nothing)"
    for _, other in wanted.values():
        if (other.role is EngineRole.REPLICA) != (member.role is EngineRole.REPLICA):
            return f"a {member.role.value} engine does not fit a fleet that has {other.role.value} engines"
        break
    return None


class FleetTarget:
    """Makes and ends engines as members come and go."""

    def __init__(self, fleet: Fleet, make: EngineMaker) -> None:
        self._fleet = fleet
        self._make = make

    def join(self, source: str, member: Member) -> None:
        """See `Target.join`; one that joins others that serve is used once it has answered a probe."""
        engine = self._make(member.config, member.role, source=source)
        if source != CONFIG:
            others = any(each.usable for each in self._fleet.engines if each.role is member.role)
            engine.health = EngineHealth.DOWN if others else EngineHealth.UNKNOWN
            _log.info("%s engine %s joined, listed by %s", engine.role.value, engine.name, source)
        self._fleet.join(engine)

    def leave(self, name: str) -> None:
        """See `Target.leave`."""
        engine = self._fleet.leave(name)
        if engine is not None:
            _log.info("%s engine %s left with %d requests in flight", engine.role.value, name, engine.in_flight)

    def mark(self, name: str, *, leaving: bool) -> None:
        """See `Target.mark`."""
        engine = self._fleet.find(name)
        if engine is not None:
            engine.shut("leaving", f"{engine.source} says that it is about to end" if leaving else None)


def configured(config: RouterConfig) -> Sequence[Member]:
    """The engines that the configuration lists."""
    roles = (
        (EngineRole.PREFILL, config.prefill),
        (EngineRole.DECODE, config.decode),
        (EngineRole.REPLICA, config.engines),
    )
    return [Member.of(role, entry) for role, entries in roles for entry in entries]
