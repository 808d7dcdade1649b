"""Engines at the hosts and ports of a name's SRV records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import dns.asyncresolver
import dns.exception
import dns.rdatatype

from kvduplex_router.config import DnsSource
from kvduplex_router.fleet.discovery.dns import Resolve, resolve
from kvduplex_router.fleet.discovery.source import DiscoveryError
from kvduplex_router.fleet.engine import EngineRole
from kvduplex_router.fleet.members import Member

__all__ = ["AskSrv", "SrvNames", "ask_srv"]

AskSrv = Callable[[str], Awaitable[Sequence[tuple[str, int]]]]
"""Hosts and ports of a name; raises `DiscoveryError`."""

_LIFETIME_S: Final = 5.0


async def ask_srv(
    name: str,
    *,
    resolver: Callable[[], dns.asyncresolver.Resolver] = dns.asyncresolver.Resolver,
    lifetime_s: float = _LIFETIME_S,
) -> Sequence[tuple[str, int]]:
    """The records of `name`, whatever their priority and weight.

    Args:
        name: A name with SRV records; the system's search domains are tried as well.
        resolver: Makes what asks; by the system's own settings, read anew each time.
        lifetime_s: Seconds for all name servers and repetitions together.

    Raises:
        DiscoveryError: No server answers, or the name has no such records.
    """
    try:
        answer = await resolver().resolve(name, dns.rdatatype.SRV, lifetime=lifetime_s, search=True)
    except dns.exception.DNSException as error:
        raise DiscoveryError(f"{name} has no SRV records to be had: {error}") from None
    records = sorted((record.target.to_text(omit_final_dot=True), record.port) for record in answer)
    return [(host, port) for host, port in records if host not in ("", ".")]


class SrvNames:
    """A `Source` over one name, each of whose records is a server, at one address of its host.

    A host with several addresses is one server with several, so one is taken, IPv4 first. A record whose host has none
    is left out, for it may be about to go.
    """

    def __init__(
        self,
        config: DnsSource,
        *,
        interval_s: float,
        missing_after: int,
        ask: AskSrv = ask_srv,
        resolve: Resolve = resolve,
    ) -> None:
        self.name = f"dns:{config.name}:srv"
        self.interval_s = interval_s
        self.missing_after = missing_after
        self._config = config
        self._ask = ask
        self._resolve = resolve

    async def look(self) -> Sequence[Member]:
        """See `Source.look`."""
        records = await self._ask(self._config.name)
        hosts = sorted({host for host, _ in records})
        found = await asyncio.gather(*(self._address(host) for host in hosts))
        addresses = {host: address for host, address in zip(hosts, found, strict=True) if address is not None}
        if hosts and not addresses:
            raise DiscoveryError(f"none of the hosts that {self._config.name} names resolves, e.g. {hosts[0]}")
        config, role = self._config, EngineRole(self._config.role.value)
        servers = ((addresses[host], port) for host, port in records if host in addresses)
        entries = (config.at(address, port, lease_port=config.lease_port) for address, port in servers)
        return [Member.of(role, entry) for server in entries for entry in server]

    async def close(self) -> None:
        """See `Source.close`."""

    async def _address(self, host: str) -> str | None:
        """Fit for a URL; None when there is none."""
        try:
            found = await self._resolve(host)
        except OSError:
            return None
        address = min(found, key=lambda each: (":" in each, each))
        return f"[{address}]" if ":" in address else address
