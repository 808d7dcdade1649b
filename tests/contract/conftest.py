"""What every contract test runs on: the backends of this installation, agents, memory, and peers of other processes.

Backends are found by their entry points. One whose devices are not here may run over host memory instead, with its
own settings otherwise: the suite then proves these settings and the agent, not its device memory, which
``make test-hardware`` does on hosts that have it.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from kvduplex_transfer.blocks import BlockArray
from kvduplex_transfer.interface import (
    BlockRef,
    MemoryRegion,
    Notification,
    Peer,
    Region,
    TransferAgent,
    TransferBackend,
)
from kvduplex_transfer.opening import open_over_host_memory

DEADLINE_S = 20.0
_ZYGOTE = Path(__file__).with_name("peer_zygote.py")
_names = itertools.count()


@dataclass(frozen=True)
class Case:
    """A backend, and the environment that its agents are opened in.

    Attributes:
        id: In the names of tests.
        backend: Entry point name.
        environment: Of this process and its peers while agents are opened.
        served: Whether a read needs its peer to run, as it does between two machines without RDMA: only then can
            a read be held up for as long as a test wants.
        over_host_memory: Whether it runs over host memory instead of its devices'.
    """

    id: str
    backend: str
    environment: Mapping[str, str] = field(default_factory=dict)
    served: bool = False
    over_host_memory: bool = False

    def load(self) -> TransferBackend:
        """The backend, made in the environment of this case."""
        (entry,) = entry_points(group="kvduplex.backends", name=self.backend)
        with self.entered():
            backend: TransferBackend = entry.load()()
        return backend

    def open(self, backend: TransferBackend, name: str) -> TransferAgent:
        """An agent of the backend, opened in the environment of this case."""
        with self.entered():
            return open_over_host_memory(backend, name) if self.over_host_memory else backend.open(name)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in self.environment.items():
                patch.setenv(key, value)
            yield


CASES = (
    Case("host", "host"),
    Case("host-tcp", "host", {"UCX_TLS": "tcp,self"}, served=True),
    # Neuron's LIBFABRIC plugin does not load without libfabric and CUDA's libraries, not even for host memory.
    Case("gpu-ucx", "gpu", {"KVDUPLEX_GPU_TRANSPORT": "ucx"}, over_host_memory=True),
)
"""The case named as its backend runs all; others the modules whose ``TRANSPORTS`` wants them, see `_wants`."""


def unique(name: str) -> str:
    """An agent name that no other test uses."""
    return f"{name}-{os.getpid()}-{next(_names)}"


@dataclass
class Memory:
    """A buffer and its registration with one agent."""

    agent: TransferAgent
    bytes: NDArray[np.uint8]
    regions: tuple[Region, ...]

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def block(self, offset: int, length: int) -> BlockRef:
        return BlockRef(self.address + offset, length)

    def blocks(self, indices: Any, length: int) -> BlockArray:
        return BlockArray.strided(self.address, indices, stride=length, length=length)


@dataclass
class Opened:
    """Opens agents of one case and closes them at the end."""

    case: Case
    backend: TransferBackend
    zygote: Zygote
    stack: contextlib.ExitStack

    def agent(self, name: str = "agent") -> TransferAgent:
        agent = self.case.open(self.backend, unique(name))
        self.stack.callback(agent.close)
        return agent

    def peer_process(
        self, name: str = "peer", *, size: int = 1 << 20, seed: int = 1, exact: bool = False
    ) -> PeerProcess:
        peer = PeerProcess(self.zygote, self.case, name if exact else unique(name), size, seed)
        self.stack.callback(peer.kill)
        return peer


class Zygote:
    """The process that peers are forked from; see peer_zygote.py."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "zygote.sock"
        self._process = subprocess.Popen(
            [sys.executable, str(_ZYGOTE), str(self._path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )

    def connect(self) -> socket.socket:
        """A new peer's connection."""
        if self._process.stdout is not None and not self._process.stdout.closed:
            assert self._process.stdout.readline() == b"ready\n"
            self._process.stdout.close()
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(DEADLINE_S)
        connection.connect(str(self._path))
        return connection

    def end(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


class PeerProcess:
    """An agent in a process of its own."""

    def __init__(self, zygote: Zygote, case: Case, name: str, size: int, seed: int) -> None:
        self.name = name
        self.bytes = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        self._socket = zygote.connect()
        self._lines = self._socket.makefile("rw", buffering=1)
        self._send(case=asdict(case), name=name, size=size, seed=seed)
        described = self.do("describe")
        self.metadata = base64.b64decode(described["metadata"])
        self.address: int = described["address"]
        self._pid: int = described["pid"]

    def do(self, what: str, **arguments: Any) -> Any:
        """Have it do something and return the answer."""
        self._send(do=what, **arguments)
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError(f"{self.name} has ended")
        return json.loads(line)["result"]

    def refresh(self) -> bytes:
        """Its metadata as of now."""
        return base64.b64decode(self.do("describe")["metadata"])

    def block(self, offset: int, length: int) -> BlockRef:
        return BlockRef(self.address + offset, length)

    def stop(self) -> None:
        """Freeze it: connections stay up, and nothing is answered."""
        os.kill(self._pid, signal.SIGSTOP)
        end = time.monotonic() + DEADLINE_S
        while not all(" T " in line for line in self._threads()):  # until then its threads may still serve reads
            assert time.monotonic() < end, f"process {self._pid} does not stop"
            time.sleep(0.001)

    def _threads(self) -> Iterator[str]:
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            yield (task / "stat").read_text().rpartition(")")[2]

    def go_on(self) -> None:
        """Let it run again, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)

    def has_run(self) -> None:
        """Wait until it ran again after `go_on`, to an answer or to its end."""
        with contextlib.suppress(ConnectionError):
            self.do("notifications")

    def kill(self) -> None:
        """End it as a power cut would, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        end = time.monotonic() + DEADLINE_S
        while psutil.pid_exists(self._pid):
            assert time.monotonic() < end, f"{self.name} does not die"
            time.sleep(0.002)
        with contextlib.suppress(BrokenPipeError):
            self._lines.close()
        self._socket.close()

    def _send(self, **message: Any) -> None:
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()


Connect = Callable[[TransferAgent, TransferAgent | PeerProcess], Peer]
Receive = Callable[[TransferAgent, int], list[Notification]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test over the cases that its module's ``TRANSPORTS`` asks for."""
    if "shared" in metafunc.fixturenames:
        wanted = getattr(metafunc.module, "TRANSPORTS", "first")
        cases = [case for case in _cases() if _wants(wanted, case)]
        metafunc.parametrize("shared", cases, indirect=True, ids=lambda case: case.id, scope="module")


def _wants(wanted: str, case: Case) -> bool:
    match wanted:
        case "every":
            return True
        case "own memory":
            return not case.over_host_memory
        case "served":
            return case.served
    return case.id == case.backend


def _cases() -> list[Case]:
    found = entry_points(group="kvduplex.backends").names
    return [case for case in CASES if case.backend in found]


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Started before it is needed, for it imports while the first agents open."""
    process = Zygote(tmp_path_factory.mktemp("zygote"))
    yield process
    process.end()


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, zygote: Zygote) -> Iterator[Opened]:
    """The case under test, for agents that a module shares: an idle one costs a tenth of a core."""
    with contextlib.ExitStack() as stack:
        yield Opened(request.param, request.param.load(), zygote, stack)


@pytest.fixture
def opened(shared: Opened) -> Iterator[Opened]:
    """The case under test, for agents and processes of one test."""
    with contextlib.ExitStack() as stack:
        yield Opened(shared.case, shared.backend, shared.zygote, stack)


@pytest.fixture(scope="module")
def reader(shared: Opened) -> TransferAgent:
    """An agent that reads; tests must leave it as they found it."""
    return shared.agent("reader")


@pytest.fixture(scope="module")
def owner(shared: Opened) -> TransferAgent:
    """An agent that is read from; tests must leave it as they found it."""
    return shared.agent("owner")


@pytest.fixture(scope="module")
def remote(shared: Opened) -> PeerProcess:
    """A peer in another process, which no test may harm."""
    return shared.peer_process("remote", size=8 << 20, seed=7)


@pytest.fixture
def memory() -> Iterator[Callable[..., Memory]]:
    """Makes buffers registered with an agent, and takes them back at the end."""
    made: list[Memory] = []

    def make(agent: TransferAgent, size: int, *, seed: int | None = None) -> Memory:
        content = np.zeros(size, dtype=np.uint8)
        if seed is not None:
            content[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        regions = agent.register([MemoryRegion(content.ctypes.data, size)])
        made.append(Memory(agent, content, regions))
        return made[-1]

    yield make
    for item in made:
        with contextlib.suppress(Exception):  # a test may have closed the agent
            item.agent.deregister(item.regions)


@pytest.fixture
def connect() -> Iterator[Callable[[TransferAgent, TransferAgent | PeerProcess], Peer]]:
    """Introduces a peer to an agent, and has it forgotten at the end."""
    known: list[tuple[TransferAgent, Peer]] = []

    def introduce(agent: TransferAgent, peer: TransferAgent | PeerProcess) -> Peer:
        metadata = peer.refresh() if isinstance(peer, PeerProcess) else peer.metadata()
        known.append((agent, agent.add_peer(metadata)))
        return known[-1][1]

    yield introduce
    for agent, peer in known:
        with contextlib.suppress(Exception):
            agent.remove_peer(peer)


@pytest.fixture
def receive(eventually: Callable[..., None]) -> Receive:
    """Collects at least so many notifications of an agent."""

    def collect(agent: TransferAgent, count: int) -> list[Notification]:
        received: list[Notification] = []

        def enough() -> bool:
            received.extend(agent.notifications())
            return len(received) >= count

        eventually(enough, f"{count} notifications arrive at {agent.name}")
        return received

    return collect


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Polls a condition until it holds or the deadline passed."""

    def wait(condition: Callable[[], bool], what: str, *, timeout_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s"
            time.sleep(0.002)

    return wait
