"""Engines at the addresses of a name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

from kvduplex_router.config import DnsSource
from kvduplex_router.fleet.discovery.source import DiscoveryError
from kvduplex_router.fleet.engine import EngineRole
from kvduplex_router.fleet.members import Member

__all__ = ["DnsNames", "Resolve", "resolve"]

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Addresses of a host name; raises `OSError` when there are none."""


async def resolve(name: str) -> Sequence[str]:
    """Addresses as the system's resolver gives them."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class DnsNames:
    """A `Source` over one name; needs no look at a zone, only ordinary resolution."""

    def __init__(self, config: DnsSource, *, interval_s: float, missing_after: int, resolve: Resolve = resolve) -> None:
        self.name = f"dns:{config.name}:{config.port}"
        self.interval_s = interval_s
        self.missing_after = missing_after
        self._config = config
        self._resolve = resolve

    async def look(self) -> Sequence[Member]:
        """See `Source.look`."""
        try:
            addresses = await self._resolve(self._config.name)
        except OSError as error:
            raise DiscoveryError(f"{self._config.name} does not resolve: {error.strerror or error}") from None
        config, role = self._config, EngineRole(self._config.role.value)
        hosts = (f"[{address}]" if ":" in address else address for address in addresses)
        assert config.port is not None  # noqa: S101 - what tells this source from SRV records
        found = (config.at(host, config.port, lease_port=config.lease_port) for host in hosts)
        return [Member.of(role, entry) for entries in found for entry in entries]

    async def close(self) -> None:
        """See `Source.close`."""
