"""The decode engine's side: keep a finished request's blocks under a lease, and give them back in time.

Runs on the scheduler thread. The lease endpoint's thread changes the table at the same time, but only this thread
touches the block pool.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from kvduplex_connector.pool import PinnedPool
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.params import RETENTION_KEY, Retention
from kvduplex_transfer.leases.table import LeaseTable

__all__ = ["Holder", "RequestLike"]

_log = logging.getLogger(__name__)

_KEPT: Final = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_REPETITION"})
_MOST_DOUBLINGS: Final = 3
_STARVING: Final = 64


class RequestLike(Protocol):
    """What is read of ``vllm.v1.request.Request``."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_output_tokens: int
    num_preemptions: int
    status: Any


class Holder:
    """Holds leases on an engine's blocks.

    Args:
        table: The leases.
        pool: The engine's blocks.
        block_size: Tokens of a block.
        watermark: Blocks kept free by ending held leases.
    """

    def __init__(self, *, table: LeaseTable, pool: PinnedPool, block_size: int, watermark: int) -> None:
        self.table = table
        self._pool = pool
        self._block_size = block_size
        self._watermark = watermark
        self._last_asked = ("", 0)
        pool.before_reset(self.drop)

    def finished(self, request: RequestLike, block_ids: Sequence[int], retention: Retention) -> dict[str, Any] | None:
        """Keep what `retention` asks for; returns what was kept, for the router, or None when nothing was asked for.

        The request's own references end right after this call, as for any other request.
        """
        if retention.id is None:
            return None
        length = self._complete_blocks(request, block_ids)
        if length:
            chain = HashChain.of(bytes(block_hash) for block_hash in request.block_hashes[:length])
            held = self.table.hold(retention.id, chain, block_ids[:length], retention.ttl_s)
            self._pool.pin(held.fresh)  # before blocks come loose: a block of both must not be free in between
            length = held.blocks
        self.collect()
        return {RETENTION_KEY: {"id": retention.id, "tokens": length * self._block_size}}

    def collect(self) -> None:
        """Give back the blocks whose leases ended."""
        if loose := self.table.take_loose():
            self._pool.unpin(loose)

    def tick(self) -> None:
        """Once a step: give back what ended, and keep the watermark free."""
        self.collect()
        self._free_up(self._watermark)

    def make_room(self, request: RequestLike, num_computed_tokens: int) -> None:
        """End held leases before the scheduler would turn `request` away for want of blocks.

        The scheduler also reserves blocks for others and does not tell how many, so the margin grows when the same
        request comes back; one that keeps coming back gets everything held, since it may not starve.
        """
        last, asked = self._last_asked
        asked = asked + 1 if last == request.request_id else 0
        self._last_asked = (request.request_id, asked)
        needed = -(-(request.num_tokens - num_computed_tokens) // self._block_size)
        margin = (self._watermark or 1) * 2 ** min(asked, _MOST_DOUBLINGS)
        self.collect()
        self._free_up(self._pool.total if asked >= _STARVING else needed + margin)

    def relieve(self) -> bool:
        """End held leases instead of a running request; whether that freed anything."""
        before = self._pool.free
        self._free_up(before + max(self._watermark, 1))
        return self._pool.free > before

    def drop(self) -> None:
        """End every lease that nobody reads: the blocks' content is no longer true."""
        self.table.drop_held()
        self.collect()

    def _free_up(self, blocks: int) -> None:
        wanted = min(blocks, self._pool.total)
        while (missing := wanted - self._pool.free) > 0 and self.table.reclaim(missing):
            self.collect()

    def _complete_blocks(self, request: RequestLike, block_ids: Sequence[int]) -> int:
        """Blocks whose every token has its KV written and hashed.

        The last sampled token has no KV yet. A step in flight may write beyond the tokens whose steps are done, never
        into them. An aborted request has a complete prompt once it has a first token.
        """
        if request.status.name not in _KEPT or not request.num_output_tokens:
            return 0
        tokens = min(request.num_tokens - 1, request.num_computed_tokens - request.num_in_flight_tokens)
        length = min(max(tokens, 0) // self._block_size, len(request.block_hashes))
        return self._pool.usable_prefix(block_ids, length)
