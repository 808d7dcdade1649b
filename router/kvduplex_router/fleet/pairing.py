"""Which prefill engines may hand KV to which decode engines."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.traits import Traits, conflict

__all__ = ["Pairs", "pair", "shut_out"]

_log = logging.getLogger("kvduplex.router.fleet")
_NOTHING = Traits()
_SHOWN = 4


class Pairs(msgspec.Struct, frozen=True):
    """Who may work with whom.

    Attributes:
        mixed: Not everybody with everybody.
        partners: Prefill engines by name of decode engine, where `mixed`.
        excluded: Why an engine can be paired with none of the other role, by its name.
    """

    mixed: bool
    partners: Mapping[str, list[Engine]]
    excluded: Mapping[str, str]


def pair(prefill: Sequence[Engine], decode: Sequence[Engine]) -> Pairs:
    """Compare every prefill engine's traits with every decode engine's; pure."""
    conflicts = {(p.name, d.name): why for p in prefill for d in decode if (why := _conflict(p, d)) is not None}
    if not conflicts:
        return Pairs(mixed=False, partners={}, excluded={})
    partners = {d.name: [p for p in prefill if (p.name, d.name) not in conflicts] for d in decode}
    excluded = {d.name: _why([(p, conflicts[p.name, d.name]) for p in prefill]) for d in decode if not partners[d.name]}
    for p in prefill:
        if all((p.name, d.name) in conflicts for d in decode):
            excluded[p.name] = _why([(d, conflicts[p.name, d.name]) for d in decode])
    return Pairs(mixed=True, partners=partners, excluded=excluded)


def shut_out(engine: Engine, reason: str | None) -> None:
    """Keep turns from an engine that fits no other, or let them in again; says so once."""
    before = engine.shut_because.get("incompatible")
    engine.shut("incompatible", reason)
    if reason is not None and before is None:
        _log.error(
            "%s engine %s is left out: %s. Start both roles with the same model, revision, server version and block "
            "size",
            engine.role.value,
            engine.name,
            reason,
        )
    elif reason is None and before is not None:
        _log.info("%s engine %s fits again", engine.role.value, engine.name)


def _conflict(prefill: Engine, decode: Engine) -> str | None:
    return conflict(prefill.traits or _NOTHING, decode.traits or _NOTHING)


def _why(others: Sequence[tuple[Engine, str]]) -> str:
    shown = "; ".join(f"with {other.role.value} engine {other.name} {why}" for other, why in others[:_SHOWN])
    more = f"; and with {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return f"it can be paired with none: {shown}{more}"
