"""KV blocks with a prefix cache: reference counts, least recently used first out.

Blocks nobody refers to keep their content until they are needed for something else, so a later request with the same
prefix finds them. What leaves the cache is told to `removed`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

__all__ = ["BlockPool"]


class BlockPool:
    """The blocks of one engine.

    Args:
        blocks: How many.
        caching: Whether finished blocks are found again.
        removed: Told the hashes whose blocks were taken for something else, in batches.
    """

    def __init__(
        self, blocks: int, *, caching: bool = True, removed: Callable[[list[bytes]], None] = lambda _hashes: None
    ) -> None:
        self.total = blocks
        self._caching = caching
        self._removed = removed
        self._cached: dict[bytes, int] = {}
        self._hash: list[bytes | None] = [None] * blocks
        self._refs = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))

    @property
    def free(self) -> int:
        """Blocks nobody refers to, cached or not."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that can be found by their hash."""
        return len(self._cached)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix."""
        cached, found = self._cached, []
        for block_hash in hashes:
            block = cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def lacking(self, hits: Sequence[int], more: int) -> int:
        """How many blocks too few are free to refer to `hits` and to `more` blocks besides."""
        idle_hits = sum(not self._refs[block] for block in hits)
        return max(0, more + idle_hits - len(self._free))

    def take(self, hits: Sequence[int], more: int) -> list[int] | None:
        """Refer to `hits` and to `more` blocks with no content; None when too few are free."""
        if self.lacking(hits, more):
            return None
        self.refer(hits)
        fresh = list(islice(self._free, more))
        evicted = []
        for block in fresh:
            del self._free[block]
            self._refs[block] = 1
            if (old := self._hash[block]) is not None:
                del self._cached[old]
                self._hash[block] = None
                evicted.append(old)
        if evicted:
            self._removed(evicted)
        return [*hits, *fresh]

    def refer(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`."""
        refs = self._refs
        for block in blocks:
            if not refs[block]:
                del self._free[block]
            refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each of `blocks`; the last ones are taken for something else before the first."""
        refs, free = self._refs, self._free
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                free[block] = None
                if self._hash[block] is None:
                    free.move_to_end(block, last=False)

    def store(self, block: int, block_hash: bytes) -> bool:
        """Let `block` be found by `block_hash`; False when another one is."""
        if not self._caching or block_hash in self._cached:
            return False
        self._cached[block_hash] = block
        self._hash[block] = block_hash
        return True

    def clear(self) -> None:
        """Forget all content that nobody refers to and stop finding the rest."""
        self._cached.clear()
        self._hash = [None] * self.total
