"""A publisher of KV events as engines have it: PUB and, for replays, ROUTER, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvduplex_router.events.hashing import chain, root, token_bytes

SIZE = 2
END = b"\xff" * 8


def stored(*tokens: int, parent: int | None = None, first: int = 0) -> dict[str, Any]:
    """Blocks of two tokens, named by what they hold."""
    names = [hash(("block", parent, *tokens[: i + SIZE])) % 2**64 for i in range(first, len(tokens), SIZE)]
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": list(tokens),
        "block_size": SIZE,
    }  # fmt: skip


def blocks(*tokens: int) -> list[int]:
    """The router's hashes of a prompt."""
    return chain(root(SIZE), token_bytes(tokens), SIZE)


class Publisher:
    """Publishes with vLLM's framing; `service` answers replays."""

    def __init__(self, context: zmq.Context[Any], *, replay: bool = True, kept: int = 1_000) -> None:
        self._pub = context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)  # as vLLM has it
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self._router = context.socket(zmq.ROUTER) if replay else None
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1") if self._router is not None else None
        self._kept = kept
        self.sent: list[tuple[int, bytes]] = []
        self.number = 0
        self.replays = 0

    def publish(self, *events: Any, lose: bool = False, payload: bytes | None = None) -> None:
        data = msgspec.msgpack.encode([0.0, list(events), 0]) if payload is None else payload
        frames = [b"", self.number.to_bytes(8, "big"), data]
        self.sent = [*self.sent, (self.number, data)][-self._kept :]
        self.number += 1
        if not lose:
            self._pub.send_multipart(frames)

    def raw(self, *frames: bytes) -> None:
        self._pub.send_multipart(list(frames))

    def service(self) -> None:
        if self._router is None:
            return
        with contextlib.suppress(zmq.Again):
            while True:
                client, empty, start = self._router.recv_multipart(zmq.NOBLOCK)
                self.replays += 1
                for number, data in self.sent:
                    if number >= int.from_bytes(start, "big"):
                        self._router.send_multipart([client, empty, b"", number.to_bytes(8, "big"), data])
                self._router.send_multipart([client, empty, b"", END, b""])

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Serve replays until `condition` holds, or fail."""
        end = asyncio.get_running_loop().time() + 10
        while not condition():
            assert asyncio.get_running_loop().time() < end, f"did not happen: {what}"
            self.service()
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self._pub.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)


@pytest.fixture
def publishers() -> Iterator[Callable[..., Publisher]]:
    """A function that makes publishers."""
    context: zmq.Context[Any] = zmq.Context()
    made: list[Publisher] = []

    def make(**options: Any) -> Publisher:
        made.append(Publisher(context, **options))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()
    context.destroy(linger=0)


@pytest.fixture
def event() -> Callable[..., dict[str, Any]]:
    return stored


@pytest.fixture
def hashes() -> Callable[..., list[int]]:
    return blocks
