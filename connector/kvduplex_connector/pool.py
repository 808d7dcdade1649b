"""Pins on an engine's KV blocks, made with the reference counts of the engine's own block pool.

A lease holds one reference to each of its blocks, like a running request would: the pool cannot hand them out, prefix
cache hits still find them, and a block given back stays in the prefix cache until it is really needed. Nothing else in
the engine has to know. All calls come from the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

__all__ = ["BlockPool", "PinnedPool"]


class BlockPool(Protocol):
    """What is used of ``vllm.v1.core.block_pool.BlockPool``, the same in vLLM 0.29 to 0.33."""

    @property
    def blocks(self) -> Sequence[Any]:
        """All blocks, by id."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to each block."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Drop a reference to each block; those without one left are evicted in this order."""

    def get_num_free_blocks(self) -> int:
        """Blocks without a reference."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any:
        """The block that holds this hash in each group, or None."""

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; refuses while any block has a reference."""


class PinnedPool:
    """The block pool as leases use it."""

    __slots__ = ("_group", "_pool")

    def __init__(self, pool: BlockPool, *, group: int = 0) -> None:
        self._pool = pool
        self._group = group

    @property
    def total(self) -> int:
        """Blocks an engine can use; the pool keeps one of its own as a placeholder."""
        return len(self._pool.blocks) - 1

    @property
    def free(self) -> int:
        """Blocks without a reference."""
        return self._pool.get_num_free_blocks()

    def pin(self, block_ids: Iterable[int]) -> None:
        """Take a reference to each block, which must have one already."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Give references back; blocks come up for eviction in this order."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def usable_prefix(self, block_ids: Sequence[int], length: int) -> int:
        """How many of the first `length` blocks, from the first on, are real ones."""
        for position, block_id in enumerate(block_ids[:length]):
            if self._pool.blocks[block_id].is_null:
                return position
        return min(length, len(block_ids))

    def cached_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many of the hashes, from the first on, the prefix cache holds."""
        for position, block_hash in enumerate(hashes):
            if not self._pool.get_cached_block(block_hash, [self._group]):
                return position
        return len(hashes)

    def before_reset(self, drop: Callable[[], None]) -> None:
        """Call `drop` before the prefix cache is reset.

        A reset says that cached KV is no longer true, after new weights for instance. Leases must not outlive it, and
        the pool refuses a reset while they pin blocks; the engine offers no hook that runs early enough.
        """
        reset = self._pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            drop()
            return reset()

        self._pool.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]
