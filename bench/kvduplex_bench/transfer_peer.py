"""The side that is read from: memory of known bytes, and a socket that tells where it lies.

The socket sends one line of JSON to whoever connects and takes nothing in. What can be read over it is this program's
own buffer of pseudo-random bytes, and nothing else.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points

import numpy as np
import psutil
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from kvduplex_bench.errors import BenchError
from kvduplex_bench.transfer_direct import DirectAgent
from kvduplex_transfer.buffers import Buffer, BufferSource, HostMemory
from kvduplex_transfer.errors import TransferError
from kvduplex_transfer.interface import TransferAgent, TransferBackend

__all__ = [
    "DEFAULT_PORT", "Offer", "backend_named", "check_memory", "fetch_offer", "offered", "pattern", "serve", "source_of",
]  # fmt: skip

DEFAULT_PORT = 5990
_VERSION = 1
_LINE_LIMIT = 1 << 20
_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """What a reader must know.

    Attributes:
        version: Of this message.
        backend: Entry point name of the backend.
        metadata: The agent's metadata, base64.
        direct: Metadata of a plain NIXL agent over the same memory, base64; empty when there is none.
        address: First byte of the buffer.
        length: Its bytes.
        device_id: Its device.
        seed: What its bytes are drawn from.
    """

    version: int
    backend: str
    metadata: str
    direct: str
    address: int
    length: int
    device_id: int
    seed: int


_OFFER = TypeAdapter(Offer)


def backend_named(name: str) -> TransferBackend:
    """Make the backend of that entry point.

    Raises:
        BenchError: There is none.
    """
    found = {point.name: point for point in entry_points(group="kvduplex.backends")}
    if name not in found:
        raise BenchError(f"--backend {name}: unknown; installed are {', '.join(sorted(found))}")
    backend: TransferBackend = found[name].load()()
    return backend


def source_of(backend: TransferBackend) -> BufferSource:
    """Where a backend's memory comes from: its devices, or the host."""
    return backend if isinstance(backend, BufferSource) else HostMemory()


def pattern(seed: int, length: int) -> NDArray[np.uint8]:
    """The bytes of a buffer."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def check_memory(needed: int) -> None:
    """Refuse what this host's memory cannot hold, before the kernel ends some process to make room.

    Args:
        needed: Bytes to be held at once.

    Raises:
        BenchError: There is less available.
    """
    available = psutil.virtual_memory().available
    if needed > available:
        raise BenchError(
            f"{needed} bytes of memory are needed, buffer and known bytes, and {available} are available on this host; "
            "ask for fewer or smaller blocks"
        )


@contextlib.contextmanager
def offered(backend: TransferBackend, *, length: int, seed: int, device_id: int = 0) -> Iterator[Offer]:
    """A registered buffer of known bytes, and its offer; both end with the block."""
    check_memory(2 * length)
    agent = backend.open(f"bench-source-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        stack.callback(agent.close)
        buffer = source_of(backend).allocate(length, device_id)
        stack.callback(buffer.close)
        _fill(buffer, pattern(seed, length))
        (region,) = agent.register([buffer.region])
        stack.callback(agent.deregister, [region])
        direct = DirectAgent(f"direct-source-{os.getpid()}", backend.nixl_settings(), buffer.region)
        stack.callback(direct.close)
        yield _offer(backend.name, agent, direct, buffer, seed)


def serve(listener: socket.socket, offer: Offer, *, until: Callable[[], bool] = lambda: False) -> None:
    """Tell the offer to everyone who connects, until `until` says so."""
    line = json.dumps(asdict(offer)).encode() + b"\n"
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while not until():
            if selector.select(0.2):
                _tell(listener, line)


def fetch_offer(host: str, port: int, *, timeout_s: float) -> Offer:
    """Ask a listening peer.

    Raises:
        BenchError: Nobody answers, or it is another program.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection, connection.makefile("rb") as file:
            line = file.readline(_LINE_LIMIT)
    except (OSError, UnicodeError) as error:  # a label that is empty or too long fails in its encoding
        raise BenchError(
            f"no transfer peer at {host}:{port} ({error}); start `kvduplex bench transfer --listen ADDRESS` there"
        ) from error
    return _parsed(line, f"{host}:{port}")


def _parsed(line: bytes, where: str) -> Offer:
    try:
        offer = _OFFER.validate_json(line, strict=True)
    except ValidationError as error:
        raise BenchError(f"{where} answers something that is no offer; is it `kvduplex bench transfer`?") from error
    if offer.version != _VERSION:
        raise BenchError(f"{where} speaks version {offer.version} of the offer, this is {_VERSION}; use equal releases")
    return offer


def _offer(backend: str, agent: TransferAgent, direct: DirectAgent, buffer: Buffer, seed: int) -> Offer:
    region = buffer.region
    return Offer(
        version=_VERSION,
        backend=backend,
        metadata=base64.b64encode(agent.metadata()).decode(),
        direct=base64.b64encode(direct.metadata()).decode(),
        address=region.address,
        length=region.length,
        device_id=region.device_id,
        seed=seed,
    )


def _fill(buffer: Buffer, content: NDArray[np.uint8]) -> None:
    for start in range(0, len(content), _CHUNK):
        buffer.write(content[start : start + _CHUNK].tobytes(), start)


def _tell(listener: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):  # a client that leaves early is its own loss
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(2.0)
            connection.sendall(line)


def _main(backend: str, length: int, seed: int) -> None:
    """Serve on a free loopback port, printed as a line, until standard input closes."""
    with (
        offered(backend_named(backend), length=length, seed=seed) as offer,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ)
            serve(listener, offer, until=lambda: bool(selector.select(0)))


if __name__ == "__main__":
    try:
        _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except (BenchError, TransferError) as error:
        sys.exit(f"transfer peer: {error}")
