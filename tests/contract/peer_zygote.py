"""Peers in processes of their own: forked from one that has imported everything, each around one agent and one region.

Run as ``python peer_zygote.py SOCKET``. Each connection to SOCKET begins with a line of JSON
``{"case", "name", "size", "seed"}`` and is then a peer's: one command a line, one answer a line.
The region holds the bytes that `numpy` draws from the seed.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from kvduplex_transfer.interface import BlockRef, MemoryRegion, Peer, TransferAgent, TransferBackend
from kvduplex_transfer.nixlwheel import import_nixl
from kvduplex_transfer.opening import open_over_host_memory

WAIT_S = 20.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Program:
    """Answers commands about one agent."""

    def __init__(self, agent: TransferAgent, size: int, seed: int) -> None:
        self.agent = agent
        self.memory = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        self.regions = agent.register([MemoryRegion(self.memory.ctypes.data, size)])

    def answer(self, command: dict[str, Any]) -> Any:  # noqa: PLR0911 - one for each command
        match command:
            case {"do": "describe"}:
                metadata = base64.b64encode(self.agent.metadata()).decode()
                return {"metadata": metadata, "address": self.memory.ctypes.data, "pid": os.getpid()}
            case {"do": "add_peer", "metadata": metadata}:
                return self.agent.add_peer(base64.b64decode(metadata)).name
            case {"do": "notify", "peer": peer, "payloads": payloads}:
                for payload in payloads:
                    self.agent.notify(Peer(peer), payload.encode())
                return None
            case {"do": "notifications"}:
                return [[message.peer, message.payload.decode()] for message in self.agent.notifications()]
            case {"do": "read", "peer": peer, "address": address, "length": length}:
                return self._read(peer, address, length)
            case {"do": "deregister"}:
                self.agent.deregister(self.regions)
                return None
            case {"do": "reregister"}:
                self.regions = self.agent.register([MemoryRegion(self.memory.ctypes.data, self.memory.nbytes)])
                return None
        raise ValueError(f"unknown command {command}")

    def _read(self, peer: str, address: int, length: int) -> str:
        local = [BlockRef(self.memory.ctypes.data, length)]
        handle = self.agent.read(Peer(peer), [BlockRef(address, length)], local)
        self.agent.wait(handle, WAIT_S)
        self.agent.release(handle)
        return base64.b64encode(self.memory[:length].tobytes()).decode()


def opened(case: dict[str, Any], name: str) -> TransferAgent:
    """An agent as the case in conftest.py says."""
    os.environ.update(case["environment"])
    (entry,) = entry_points(group="kvduplex.backends", name=case["backend"])
    backend: TransferBackend = entry.load()()
    return open_over_host_memory(backend, name) if case["over_host_memory"] else backend.open(name)


def serve(connection: socket.socket) -> None:
    """Be one peer until the connection ends."""
    with connection.makefile("rw", buffering=1) as lines:
        wanted = json.loads(lines.readline())
        with opened(wanted["case"], wanted["name"]) as agent:
            program = Program(agent, wanted["size"], wanted["seed"])
            for line in lines:
                lines.write(json.dumps({"result": program.answer(json.loads(line))}) + "\n")


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends: a frozen one could not notice by itself."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(path: str) -> None:
    with contextlib.suppress(ImportError):  # imported, not opened: NIXL's threads must not exist before the fork
        import_nixl()
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                end_with_parent()
                listener.close()
                serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
