"""A fake engine for measuring routers: answers at once, in the shapes vLLM uses, and does nothing else.

``python -m kvduplex_bench.router_engine PORT [LEASE_PORT]``. A request's ``max_tokens`` is the number of stream chunks,
its ``seed`` the pause between them in milliseconds. With a lease port it keeps the leases that requests name, a block
each, in the real table behind the real endpoint, and drops the oldest beyond its budget as a full engine would.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from typing import Any, Final

import httptools
import uvloop

from kvduplex_transfer.leases import messages
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.records import LeaseLimits
from kvduplex_transfer.leases.server import LeaseServer
from kvduplex_transfer.leases.table import LeaseTable

__all__ = ["main"]

_BUDGET: Final = 65_536
_CHAIN: Final = HashChain.of([b"h" * 32])
_PARAMS: Final = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(11, 27))],
    "remote_engine_id": "6f1c1f9e-8c2f-4f8a-a7b5-2f0d5f6b8a11",
    "remote_request_id": "chatcmpl-0123456789abcdef",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
_USAGE: Final = {"prompt_tokens": 250, "total_tokens": 251, "completion_tokens": 1, "prompt_tokens_details": None}
_HEAD: Final = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "created": 1_790_000_000, "model": "tiny"}


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _chunk(delta: dict[str, str], finish: str | None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    frame = {**_HEAD, "object": "chat.completion.chunk", "choices": [choice], **more}
    data = b"data: " + _compact(frame) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


_TOKEN: Final = _chunk({"content": " token"}, None)
_END: Final = (
    _chunk({"content": ""}, "length", usage=_USAGE, kv_transfer_params=_PARAMS) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _reply(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


_MESSAGE: Final = {"role": "assistant", "content": " token"}
_ANSWER: Final = _reply(
    _compact(
        {
            **_HEAD,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "length"}],
            "usage": _USAGE,
            "kv_transfer_params": _PARAMS,
        }
    )
)
_MODELS: Final = _reply(_compact({"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]}))


class _Leases:
    """The lease side of a decode engine."""

    def __init__(self, port: int) -> None:
        self._table = LeaseTable(limits=LeaseLimits(budget_blocks=_BUDGET), clock=time.monotonic)
        self._server = LeaseServer(
            table=self._table, identity=self._identity, source=lambda: None, host="127.0.0.1", port=port
        )
        self._server.start()
        self._blocks = itertools.count()

    @staticmethod
    def _identity(nonce: int) -> messages.Identity:
        return messages.Identity(nonce, "fake", "tiny", "0", 16, b"fake", 0, 0, _BUDGET, 30.0, 480.0)

    def hold(self, body: dict[str, Any]) -> None:
        """Keep the lease that a request names, if it does."""
        lease = (body.get("kv_transfer_params") or {}).get("lease")
        if lease and "id" in lease:
            self._table.hold(lease["id"], _CHAIN, [next(self._blocks)], lease.get("ttl_s"))
            self._table.take_loose()


class _Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, leases: _Leases | None) -> None:
        self._leases = leases

    def connection_made(self, transport: Any) -> None:
        """A client connected."""
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._pacer: asyncio.Task[None] | None = None

    def connection_lost(self, _exc: Exception | None) -> None:
        """It left."""
        if self._pacer is not None:
            self._pacer.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.close()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._body: list[bytes] = []
        self._path = b""

    def on_url(self, url: bytes) -> None:
        """Its path."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """Part of its body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """It is complete."""
        if not self._path.startswith((b"/v1/chat/completions", b"/v1/completions")):
            self._transport.write(_MODELS if self._path.startswith(b"/v1/models") else _reply(b"{}"))
            return
        body = json.loads(b"".join(self._body))
        if self._leases is not None:
            self._leases.hold(body)
        if not body.get("stream"):
            self._transport.write(_ANSWER)
            return
        chunks, pause_s = int(body.get("max_tokens") or 16) - 1, float(body.get("seed") or 0) / 1000
        self._transport.write(_STREAM_HEAD)
        if pause_s:
            self._pacer = asyncio.get_running_loop().create_task(self._paced(chunks, pause_s))
        else:
            for _ in range(chunks):
                self._transport.write(_TOKEN)
            self._transport.write(_END)

    async def _paced(self, chunks: int, pause_s: float) -> None:
        for _ in range(chunks):
            self._transport.write(_TOKEN)
            await asyncio.sleep(pause_s)
        self._transport.write(_END)


def main(port: int, lease_port: int | None = None) -> None:
    """Serve on loopback until killed."""
    leases = None if lease_port is None else _Leases(lease_port)

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Engine(leases), "127.0.0.1", port)
        await server.serve_forever()

    uvloop.run(serve())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
