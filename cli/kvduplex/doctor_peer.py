"""What a peer host shows from here: addresses, ports, vLLM's version. Looking is I/O, judging is pure.

vLLM's NIXL side channel is only connected to: its listener ends at the first message it cannot unpack, and the form of
that message differs between versions (``nixl/base_scheduler.py`` of 0.29 and 0.32), so nothing is ever sent to it.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from dataclasses import dataclass

from kvduplex_transfer.engine_options import WILDCARD_HOSTS
from kvduplex_transfer.host.options import HTTP_PORTS, LEASE_PORTS, SIDE_CHANNEL_PORTS
from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.interface import Finding, Role

__all__ = ["Listener", "PeerPorts", "PeerSeen", "judge_peer", "look_at_peer"]

_DEADLINE_S = 2.0
_ZMTP_SIGNATURE = (0xFF, 0x7F)  # first and tenth byte of a ZeroMQ greeting (ZMTP 3.1, section 3.1)
_SECURITY_GROUP = "let the security group of both hosts allow all traffic within itself, and start the engine there"


@dataclass(frozen=True, slots=True)
class PeerPorts:
    """Where a peer engine's servers are."""

    http: int
    side_channel: int
    lease: int

    @classmethod
    def usual(cls, role: Role) -> PeerPorts:
        """The ports that recipes give to the first engine of `role`."""
        return cls(HTTP_PORTS[role], SIDE_CHANNEL_PORTS[role], LEASE_PORTS[role])


@dataclass(frozen=True, slots=True)
class Listener:
    """What answers at a port.

    Attributes:
        open: Whether a connection was accepted.
        zeromq: Whether it greeted like a ZeroMQ socket.
        error: Why there was no connection.
    """

    open: bool
    zeromq: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """Everything that was seen of a peer.

    Attributes:
        host: As it was given.
        addresses: What it resolves to; empty when it does not.
        http: Its HTTP server.
        healthy: Whether ``/health`` answered 200.
        vllm: Version that its ``/version`` names.
        side_channel: Its NIXL handshake listener.
        lease: Its lease server.
    """

    host: str
    addresses: tuple[str, ...]
    http: Listener
    healthy: bool
    vllm: str | None
    side_channel: Listener
    lease: Listener

    @property
    def reachable(self) -> bool:
        """Whether its ports could be tried at all."""
        return bool(self.addresses) and self.host not in WILDCARD_HOSTS


def look_at_peer(host: str, ports: PeerPorts, *, deadline_s: float = _DEADLINE_S) -> PeerSeen:
    """Connect to each port of a peer; at most `deadline_s` seconds each."""
    addresses = _resolve(host)
    if not addresses or host in WILDCARD_HOSTS:
        closed = Listener(open=False, error="not tried")
        return PeerSeen(host, addresses, closed, False, None, closed, closed)
    http_server = _connect(host, ports.http, deadline_s)
    answers = _http_answers(host, ports.http, deadline_s) if http_server.open else (False, None)
    return PeerSeen(
        host,
        addresses,
        http_server,
        *answers,
        _connect(host, ports.side_channel, deadline_s),
        _connect(host, ports.lease, deadline_s),
    )


def judge_peer(seen: PeerSeen, ports: PeerPorts, *, vllm: str | None) -> list[Finding]:
    """Compare a peer with this host.

    Args:
        seen: What was seen of it.
        ports: Which ports were tried.
        vllm: Version of vLLM on this host; None when there is none.
    """
    address = _address(seen)
    if not seen.reachable:
        return [address]
    return [
        address,
        _http(seen, ports.http),
        _version(seen, vllm),
        _side_channel(seen.side_channel, ports.side_channel),
        _lease(seen.lease, ports.lease),
    ]


def _resolve(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a label that is empty or too long fails in its encoding
        return ()
    return tuple(sorted({str(entry[4][0]) for entry in found}))


def _connect(host: str, port: int, deadline_s: float) -> Listener:
    try:
        with socket.create_connection((host, port), timeout=deadline_s) as connection:
            connection.settimeout(min(deadline_s, 0.5))  # a ZeroMQ socket greets first, an HTTP server never does
            return Listener(open=True, zeromq=_greets_like_zeromq(connection))
    except OSError as error:
        return Listener(open=False, error=error.strerror or type(error).__name__)


def _greets_like_zeromq(connection: socket.socket) -> bool:
    greeting = b""
    try:
        while len(greeting) < 10:  # noqa: PLR2004 - length of the signature
            piece = connection.recv(64)
            if not piece:
                return False
            greeting += piece
    except OSError:
        return False
    return (greeting[0], greeting[9]) == _ZMTP_SIGNATURE


def _http_answers(host: str, port: int, deadline_s: float) -> tuple[bool, str | None]:
    return _get(host, port, "/health", deadline_s) is not None, _named_version(_get(host, port, "/version", deadline_s))


def _get(host: str, port: int, path: str, deadline_s: float) -> bytes | None:
    connection = http.client.HTTPConnection(host, port, timeout=deadline_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if answer.status == http.client.OK else None


def _named_version(body: bytes | None) -> str | None:
    try:
        named = json.loads(body or b"null")
    except ValueError:
        return None
    version = named.get("version") if isinstance(named, dict) else None
    return version if isinstance(version, str) else None


def _address(seen: PeerSeen) -> Finding:
    expected = "an address that both hosts reach"
    if seen.host in WILDCARD_HOSTS:
        why, fix = "a wildcard can be bound, not dialled", "give the peer's private address (`hostname -I` on it)"
        return fail("peer.address", seen.host, expected, why=why, fix=fix)
    if not seen.addresses:
        why = "engines dial each other by the name they were given"
        fix = "give the peer's private address, or a name that resolves here"
        return fail("peer.address", f"{seen.host} does not resolve", expected, why=why, fix=fix)
    listed = ", ".join(seen.addresses)
    if any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in seen.addresses):
        why = "that is this host itself, not a peer"
        fix = "give the peer's private address, unless both engines run here"
        return warn("peer.address", listed, expected, why=why, fix=fix)
    return ok("peer.address", listed, expected)


def _http(seen: PeerSeen, port: int) -> Finding:
    expected = f"an engine that answers /health on port {port}"
    if seen.healthy:
        return ok("peer.http", "healthy", expected)
    if seen.http.open:
        why = "the port is open, but no healthy engine answers there; it may still be loading or compiling"
        return warn("peer.http", "open, /health not 200", expected, why=why, fix="read the engine's log on the peer")
    why = "the router could not send it requests"
    return fail("peer.http", f"port {port}: {seen.http.error}", expected, why=why, fix=_SECURITY_GROUP)


def _version(seen: PeerSeen, own: str | None) -> Finding:
    expected = f"vLLM {own}, as here" if own else "the same vLLM on both hosts"
    if not seen.vllm or not own:
        why = "versions cannot be compared; engines of different versions refuse each other's handshake"
        fix = "compare `python -c 'import vllm; print(vllm.__version__)'` on both hosts"
        return warn("peer.version", f"here {own or 'none'}, there {seen.vllm or 'unknown'}", expected, why=why, fix=fix)
    if _release(seen.vllm) == _release(own):
        return ok("peer.version", seen.vllm, expected)
    return fail(
        "peer.version",
        f"here {own}, there {seen.vllm}",
        expected,
        why="the NIXL handshake compares a hash of version, model and layout: KV never moves between these two",
        fix="install the same version on both hosts, from the same image or the same pins",
    )


def _release(version: str) -> str:
    # Builds of one release differ in a local part (`+cpu`) or in the plugin's own digits behind it.
    return ".".join(version.partition("+")[0].split(".")[:3])


def _side_channel(listener: Listener, port: int) -> Finding:
    expected = f"vLLM's NIXL side channel on port {port}"
    if listener.zeromq:
        return ok("peer.side_channel", "a ZeroMQ socket", expected)
    why = "engines exchange memory addresses there before the first transfer; requests stall without it"
    if listener.open:
        fix = "see which program has the port on the peer: `ss -ltnp`, and what VLLM_NIXL_SIDE_CHANNEL_PORT is there"
        return fail("peer.side_channel", f"port {port} is something else", expected, why=why, fix=fix)
    fix = f"check VLLM_NIXL_SIDE_CHANNEL_HOST on the peer, and {_SECURITY_GROUP}"
    return fail("peer.side_channel", f"port {port}: {listener.error}", expected, why=why, fix=fix)


def _lease(listener: Listener, port: int) -> Finding:
    expected = f"a lease server on port {port}, on decode engines with the leased connector"
    if listener.zeromq:
        return ok("peer.lease", "a ZeroMQ socket", expected)
    seen = f"port {port} is something else" if listener.open else f"port {port}: {listener.error}"
    why = "claims go there; prefill engines and the stock connector have none"
    return warn("peer.lease", seen, expected, why=why, fix="nothing, unless the peer should have leases")
