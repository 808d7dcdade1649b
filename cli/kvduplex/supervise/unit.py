"""What the supervisor runs: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

__all__ = ["Stage", "Unit", "UnitKind"]


class UnitKind(StrEnum):
    """What a unit is to its user."""

    ENGINE = "engine"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of a program's start, recognised in its log.

    Attributes:
        mark: Text that a log line of this step contains.
        label: What the user is shown, e.g. ``loading weights``.
    """

    mark: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One program.

    Attributes:
        name: Short name, e.g. ``decode-0``; unique in its cluster.
        kind: Engine or router.
        argv: The program and its arguments.
        environment: Added to the inherited environment.
        url: Base URL of its HTTP server.
        ports: Every TCP port it listens on, by purpose.
        bind_host: Address it binds.
        log: File that its output is appended to.
        scratch: Folder made for it at start and deleted with all content at its end, and so is the folder around it
            once that is empty.
        cores: Where its pinned threads belong; empty to leave them where the program puts them.
        health_path: Answers 200 once the program is ready.
        stages: Steps of its start.
    """

    name: str
    kind: UnitKind
    argv: tuple[str, ...]
    url: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    bind_host: str = "127.0.0.1"
    scratch: Path | None = None
    cores: frozenset[int] = frozenset()
    health_path: str = "/health"
    stages: tuple[Stage, ...] = ()
