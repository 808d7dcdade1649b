"""Block hashes of content that is only named: equal names at equal places give equal blocks, as equal tokens would."""

from __future__ import annotations

from hashlib import blake2b

from kvduplex_bench.sim.core.chain import HASH_SIZE

__all__ = ["ContentChain"]


class ContentChain:
    """A conversation's tokens so far, by name.

    Args:
        block_size: Tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._open: list[bytes] = []
        self._last = b""
        self.tokens = 0
        self.hashes: list[bytes] = []

    def add(self, name: str, tokens: int) -> None:
        """Append `tokens` tokens of the content called `name`."""
        key, size, offset = name.encode(), self._size, 0
        while (step := size - self.tokens % size) <= tokens - offset:
            offset += step
            self.tokens += step
            content = b"|".join((self._last, *self._open, key, offset.to_bytes(4, "little")))
            self._last = blake2b(content, digest_size=HASH_SIZE).digest()
            self.hashes.append(self._last)
            self._open.clear()
        if tokens > offset:
            self._open.append(b"%b:%d:%d" % (key, offset, tokens))
            self.tokens += tokens - offset
