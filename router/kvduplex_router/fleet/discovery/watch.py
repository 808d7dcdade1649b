"""Looks at every source again and again, and tells the fleet what changed.

A source that fails changes nothing: an outage of DNS or of EC2's API must not empty a fleet that serves. An engine that
a source no longer finds is let go only after several looks, for both are known to leave one out now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvduplex_router.fleet.discovery.source import DiscoveryError, Source
from kvduplex_router.fleet.members import Member, Members

__all__ = ["Discovery"]

_log = logging.getLogger("kvduplex.router.discovery")


class Discovery:
    """See the module.

    Args:
        sources: What to look at.
        members: Told what each lists.
        timeout_s: For one look.
    """

    def __init__(self, sources: Sequence[Source], members: Members, *, timeout_s: float) -> None:
        self._sources = sources
        self._members = members
        self._timeout_s = timeout_s
        self._listed: dict[str, dict[str, Member] | None] = {source.name: None for source in sources}
        self._missed: dict[tuple[str, str], int] = {}

    async def look_once(self) -> None:
        """Look at every source, so that a router which begins to serve knows its engines."""
        await asyncio.gather(*(self.look(source) for source in self._sources))

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for source in self._sources:
                    group.create_task(self._watch(source))
        finally:
            for source in self._sources:
                await source.close()

    async def _watch(self, source: Source) -> None:
        while True:
            await self.look(source)
            await asyncio.sleep(source.interval_s)

    async def look(self, source: Source) -> None:
        """Look at one source once."""
        try:
            async with asyncio.timeout(self._timeout_s):
                members = await source.look()
        except TimeoutError:
            self._failed(source, f"no answer within {self._timeout_s:g} s")
        except DiscoveryError as error:
            self._failed(source, str(error))
        else:
            if source.name in self._members.errors:
                _log.warning("discovery: %s can be read again", source.name)
                self._members.note(source.name, None)
            self._judge(source, members)

    def _failed(self, source: Source, error: str) -> None:
        if source.name not in self._members.errors:
            _log.error("discovery: %s cannot be read: %s; the engines it listed stay", source.name, error)
        if self._members.errors.get(source.name) != error:
            self._members.note(source.name, error)

    def _judge(self, source: Source, members: Sequence[Member]) -> None:
        listed = self._listed[source.name]
        now = {member.config.target: member for member in members}
        kept = dict(now)
        for target, member in (listed or {}).items():
            if target in now:
                self._missed.pop((source.name, target), None)
                continue
            missed = self._missed[source.name, target] = self._missed.get((source.name, target), 0) + 1
            if missed < source.missing_after:
                kept[target] = member
            else:
                del self._missed[source.name, target]
        if kept != listed:
            self._listed[source.name] = kept
            self._members.update(source.name, kept.values())
