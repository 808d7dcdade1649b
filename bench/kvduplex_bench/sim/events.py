"""KV events as vLLM publishes them: a ZeroMQ PUB socket, and a ROUTER that sends past batches again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from kvduplex_bench.sim.core.engine import Removed, Stored
from kvduplex_bench.sim.errors import SimError

__all__ = ["EventPublisher", "encode_batch"]

_BUFFERED: Final = 10_000
_QUEUED: Final = 100_000
_END: Final = (-1).to_bytes(8, "big", signed=True)
_REPLAY_FRAMES: Final = 3
_ENCODER: Final = msgspec.msgpack.Encoder()


class _BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class EventPublisher:
    """Publishes one engine's events.

    Args:
        context: Shared by the engines of a process.
        endpoint: ``tcp://HOST:PORT`` of the PUB socket.
        replay: ``tcp://HOST:PORT`` of the ROUTER.
        block_size: Tokens of a block.

    Raises:
        SimError: An address cannot be bound.
    """

    def __init__(self, context: zmq.asyncio.Context, *, endpoint: str, replay: str, block_size: int) -> None:
        self._block_size = block_size
        self._sequence = 0
        self._past: deque[tuple[int, bytes]] = deque(maxlen=_BUFFERED)
        self._pub: zmq.Socket[bytes] = zmq.Context(context).socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        self._pub.linger = self._replay.linger = 0
        self._pub.set_hwm(_QUEUED)
        try:
            self._pub.bind(endpoint)
            self._replay.bind(replay)
        except zmq.ZMQError as error:
            self._close()
            raise SimError(f"KV events cannot be published at {endpoint} and {replay}: {error}") from error
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def publish(self, events: Iterable[Stored | Removed]) -> None:
        """Send a batch."""
        self._send(encode_batch(events, self._block_size))

    def cleared(self) -> None:
        """Everything was forgotten."""
        self._send(_encoded([_AllBlocksCleared()]))

    async def close(self) -> None:
        """Free both ports."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._close()

    def _close(self) -> None:
        self._pub.close()
        self._replay.close()

    def _send(self, payload: bytes) -> None:
        self._past.append((self._sequence, payload))
        self._pub.send_multipart((b"", self._sequence.to_bytes(8, "big"), payload))
        self._sequence += 1

    async def _serve(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != _REPLAY_FRAMES:
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in list(self._past):
                if sequence >= start:
                    await self._replay.send_multipart((client, b"", b"", sequence.to_bytes(8, "big"), payload))
            await self._replay.send_multipart((client, b"", b"", _END, b""))


def encode_batch(events: Iterable[Stored | Removed], block_size: int) -> bytes:
    """One message's payload, as vLLM encodes it.

    Args:
        events: What changed, in order.
        block_size: Tokens of a block.
    """
    return _encoded([_event(event, block_size) for event in events])


def _encoded(events: list[Any]) -> bytes:
    return _ENCODER.encode(_Batch(time.time(), events, 0))


def _event(event: Stored | Removed, size: int) -> _BlockStored | _BlockRemoved:
    if isinstance(event, Removed):
        return _BlockRemoved(event.hashes, "GPU", 0)
    work = event.work
    parent = bytes(work.hashes[event.start - 1]) if event.start else None
    tokens = list(work.tokens[event.start * size : event.end * size])
    return _BlockStored(list(work.hashes[event.start : event.end]), parent, tokens, size, None, "GPU", None, 0)
