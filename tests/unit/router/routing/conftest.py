"""An engine's publisher of KV events, for engines that are otherwise scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

SIZE = 16
END = b"\xff" * 8


class Publisher:
    """Publishes blocks of 16 tokens, and answers that there is nothing to replay but what was sent."""

    def __init__(self, context: zmq.Context[Any], rank: int) -> None:
        self._rank = rank
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        events, replay = (each.bind_to_random_port("tcp://127.0.0.1") for each in (self._pub, self._router))
        self.entry = {"kv_events": f"127.0.0.1:{events}", "kv_replay": f"127.0.0.1:{replay}"}
        self._sent: list[bytes] = []

    def _publish(self, event: dict[str, Any]) -> None:
        self._sent.append(msgspec.msgpack.encode([0.0, [event], self._rank]))
        self._pub.send_multipart([b"", (len(self._sent) - 1).to_bytes(8, "big"), self._sent[-1]])

    def clear(self) -> None:
        self._publish({"type": "AllBlocksCleared"})

    async def hold(self, tokens: bytes) -> None:
        ids = np.frombuffer(tokens, np.uint32).tolist()
        count = len(ids) // SIZE
        names = [hash(tuple(ids[: (i + 1) * SIZE])) % 2**64 for i in range(count)]
        self._publish({
            "type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": ids[: count * SIZE],
            "block_size": SIZE,
        })  # fmt: skip

    async def settled(self, condition: Callable[[], bool]) -> None:
        end = asyncio.get_running_loop().time() + 10
        while not condition():
            assert asyncio.get_running_loop().time() < end, "the events did not arrive"
            self.service()
            await asyncio.sleep(0.01)

    def service(self) -> None:
        while self._router.poll(0):
            client, empty, start = self._router.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(self._sent)):
                frames = [client, empty, b"", number.to_bytes(8, "big"), self._sent[number]]
                self._router.send_multipart(frames)
            self._router.send_multipart([client, empty, b"", END, b""])


@pytest.fixture
async def publisher() -> AsyncIterator[Callable[[], Publisher]]:
    """A function that makes publishers; their replays are answered in the background."""
    context: zmq.Context[Any] = zmq.Context()
    made: list[Publisher] = []

    async def serve() -> None:
        while True:
            for each in made:
                each.service()
            await asyncio.sleep(0.01)

    serving = asyncio.create_task(serve())

    def make(rank: int = 0) -> Publisher:
        made.append(Publisher(context, rank))
        return made[-1]

    yield make
    serving.cancel()
    context.destroy(linger=0)
