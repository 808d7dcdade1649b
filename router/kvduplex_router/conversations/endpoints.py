"""Keeps a ledger's lease endpoints those of the fleet."""

from __future__ import annotations

from kvduplex_router.config import Reuse, RouterConfig
from kvduplex_router.conversations.ledger import OwnLedger
from kvduplex_router.fleet.engine import Engine, EngineRole
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.fleet.members import Member

__all__ = ["LedgerTarget"]


class LedgerTarget:
    """A `kvduplex_router.fleet.members.Target` for a process that keeps a ledger; with a fleet it may follow that."""

    def __init__(self, config: RouterConfig, ledger: OwnLedger) -> None:
        self._leased = config.reuse in (Reuse.AUTO, Reuse.LEASED)
        self._ledger = ledger

    def follow(self, fleet: Fleet) -> None:
        """Keep up with the engines of a fleet in this process."""
        fleet.subscribe(self._changed)

    def join(self, source: str, member: Member) -> None:  # noqa: ARG002 - of no matter here
        """See `Target.join`."""
        lease = member.config.lease
        if self._leased and member.role is EngineRole.DECODE and lease is not None:
            self._ledger.set_endpoint(member.config.name, f"tcp://{lease}")

    def leave(self, name: str) -> None:
        """See `Target.leave`."""
        self._ledger.set_endpoint(name, None)

    def mark(self, name: str, *, leaving: bool) -> None:
        """See `Target.mark`: leases of an engine that is about to end are kept while it lasts."""

    def _changed(self, engine: Engine, joined: bool) -> None:
        decode = self._leased and engine.role is EngineRole.DECODE
        self._ledger.set_endpoint(engine.name, engine.address.lease_endpoint if joined and decode else None)
