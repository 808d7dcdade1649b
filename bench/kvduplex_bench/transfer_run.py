"""Measures reads of KV-sized blocks through the transfer interface, next to NIXL itself and to the host's memory."""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvduplex_bench.errors import BenchError
from kvduplex_bench.transfer_direct import DirectAgent
from kvduplex_bench.transfer_peer import Offer, backend_named, check_memory, fetch_offer, pattern, source_of
from kvduplex_transfer.blocks import BlockArray
from kvduplex_transfer.buffers import Buffer
from kvduplex_transfer.errors import TransferError
from kvduplex_transfer.interface import Peer, TransferAgent
from kvduplex_transfer.nixl_errors import nixl_call

__all__ = ["Case", "Measured", "loopback_peer", "measure", "memory_copy_rate"]

_READ_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 90.0
_SHUFFLE_SEED = 20261012


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of a read: `blocks` blocks of `block_bytes` each."""

    block_bytes: int
    blocks: int

    @property
    def total(self) -> int:
        """Bytes of the read."""
        return self.block_bytes * self.blocks

    @property
    def samples(self) -> list[int]:
        """Blocks whose bytes are checked: the first, the middle and the last."""
        return sorted({0, self.blocks // 2, self.blocks - 1})


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one case, in seconds, through the interface and directly through NIXL.

    Attributes:
        case: What was read.
        interface: Each read through the transfer interface.
        direct: Each read through NIXL alone, in turns with the others.
    """

    case: Case
    interface: tuple[float, ...]
    direct: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Bytes a second through the interface, of the median read."""
        return self.case.total / statistics.median(self.interface)

    @property
    def direct_rate(self) -> float:
        """Bytes a second directly, of the median read."""
        return self.case.total / statistics.median(self.direct)

    @property
    def share(self) -> float:
        """How much of NIXL's own rate the interface keeps."""
        return self.rate / self.direct_rate

    @property
    def overhead_s(self) -> float:
        """What the interface adds to a median read, in seconds."""
        return statistics.median(self.interface) - statistics.median(self.direct)


@contextlib.contextmanager
def loopback_peer(backend: str, *, length: int, seed: int) -> Iterator[Offer]:
    """A peer in a process of its own on this host.

    Raises:
        BenchError: It does not start.
    """
    argv = [sys.executable, "-m", "kvduplex_bench.transfer_peer", backend, str(length), str(seed)]
    # In a group of its own, so that Ctrl-C reaches this process alone, which then ends the other.
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        yield fetch_offer("127.0.0.1", _announced_port(process), timeout_s=5.0)
    finally:
        _end(process)


def measure(
    backend_name: str, offer: Offer, cases: Sequence[Case], *, repeats: int, report: Callable[[Measured], None]
) -> list[Measured]:
    """Measure each case, both arms in turns.

    Args:
        backend_name: Entry point name.
        offer: The peer's memory.
        cases: What to read; none larger than the peer's memory.
        repeats: Reads of each arm a case, after one that is not counted.
        report: Told of each case as it is done.

    Raises:
        BenchError: The peer runs another backend, has too little memory, or its bytes did not arrive.
    """
    if offer.backend != backend_name:
        raise BenchError(f"the peer offers backend {offer.backend}, not {backend_name}; start both with the same one")
    largest = max(case.total for case in cases)
    if largest > offer.length:
        raise BenchError(f"the peer offers {offer.length} bytes, {largest} are needed; start it with --bytes {largest}")
    check_memory(largest + offer.length)
    with _Reader.open(backend_name, offer, largest) as reader:
        found = []
        for case in cases:
            found.append(reader.measure(case, repeats))
            report(found[-1])
        return found


def memory_copy_rate(length: int = 64 << 20, repeats: int = 5) -> float:
    """Bytes a second that one core copies within host memory: the limit of any transfer over loopback."""
    source, target = np.ones(length, dtype=np.uint8), np.zeros(length, dtype=np.uint8)
    best = min(_timed(lambda: np.copyto(target, source)) for _ in range(repeats))
    return length / best


class _Reader:
    """Both arms over one local buffer."""

    def __init__(self, agent: TransferAgent, direct: DirectAgent, buffer: Buffer, offer: Offer) -> None:
        self._agent, self._direct, self._buffer, self._offer = agent, direct, buffer, offer
        self._expected = pattern(offer.seed, offer.length)
        self._peer: Peer = agent.add_peer(base64.b64decode(offer.metadata))
        self._direct_peer = direct.add_peer(base64.b64decode(offer.direct))

    @classmethod
    @contextlib.contextmanager
    def open(cls, backend_name: str, offer: Offer, length: int) -> Iterator[_Reader]:
        backend = backend_named(backend_name)
        with contextlib.ExitStack() as stack:
            try:
                agent = backend.open(f"bench-reader-{os.getpid()}")
                stack.callback(agent.close)
                buffer = source_of(backend).allocate(length)
                stack.callback(buffer.close)
                (region,) = agent.register([buffer.region])
                stack.callback(agent.deregister, [region])
                # Around the whole and not around each read: reads are timed.
                stack.enter_context(nixl_call("read directly through NIXL"))
                direct = DirectAgent(f"direct-reader-{os.getpid()}", backend.nixl_settings(), buffer.region)
                stack.callback(direct.close)
                yield cls(agent, direct, buffer, offer)
            except TransferError as error:
                raise BenchError(f"backend {backend_name}: {error}") from error

    def measure(self, case: Case, repeats: int) -> Measured:
        remote, local, order = self._blocks(case)
        for arm in (self._read, self._read_directly):
            self._clear(case)
            arm(remote, local)
            self._verify(case, order)
        interface, direct = [], []
        for _ in range(repeats):
            interface.append(_timed(lambda: self._read(remote, local)))
            direct.append(_timed(lambda: self._read_directly(remote, local)))
        return Measured(case, tuple(interface), tuple(direct))

    def _blocks(self, case: Case) -> tuple[BlockArray, BlockArray, list[int]]:
        # Blocks of a conversation lie scattered over a peer's cache, so neighbours must not be merged into one read.
        places = self._offer.length // case.block_bytes
        order = np.random.default_rng(_SHUFFLE_SEED).permutation(places)[: case.blocks]
        size = case.block_bytes
        there = BlockArray.strided(
            self._offer.address, order, stride=size, length=size, device_id=self._offer.device_id
        )
        region = self._buffer.region
        here = BlockArray.strided(
            region.address, np.arange(case.blocks), stride=size, length=size, device_id=region.device_id
        )
        return there, here, [int(place) for place in order]

    def _read(self, remote: BlockArray, local: BlockArray) -> None:
        handle = self._agent.read(self._peer, remote, local)
        try:
            self._agent.wait(handle, _READ_TIMEOUT_S)
        finally:
            self._agent.release(handle)

    def _read_directly(self, remote: BlockArray, local: BlockArray) -> None:
        self._direct.read(self._direct_peer, remote.rows, local.rows, timeout_s=_READ_TIMEOUT_S)

    def _clear(self, case: Case) -> None:
        for index in case.samples:
            self._buffer.write(bytes(case.block_bytes), index * case.block_bytes)

    def _verify(self, case: Case, order: list[int]) -> None:
        for index in case.samples:
            start = order[index] * case.block_bytes
            expected = self._expected[start : start + case.block_bytes].tobytes()
            if self._buffer.read(case.block_bytes, index * case.block_bytes) != expected:
                raise BenchError(f"block {index} of {case.blocks} x {case.block_bytes} bytes arrived with other bytes")


def _timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _announced_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None  # noqa: S101 - it was asked for as a pipe
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(_START_TIMEOUT_S):
            raise BenchError(f"the peer process did not start within {_START_TIMEOUT_S:g} s")
    for line in process.stdout:
        if line.strip().isdigit():  # vendor libraries may log before it
            return int(line)
    raise BenchError(f"the peer process ended with status {process.wait(5)}; its messages are above")


def _end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
