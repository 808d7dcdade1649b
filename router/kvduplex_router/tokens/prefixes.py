"""Tokens of text by its beginnings, so that a conversation that grew by a turn is not tokenised again.

Chat templates end every message with a special token. Tokenizers cut text at special tokens before anything else, so
tokens up to one depend on nothing after it; whether that holds for a tokenizer is tried before it is relied on.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import accumulate
from typing import Final

from kvduplex_router.tokens.prompt import Prefix

__all__ = ["PrefixTokens", "Segments"]

_FIRST: Final = 1


class Segments:
    """A text cut behind every `end`.

    Attributes:
        keys: A digest of the text up to each cut.
        ends: Characters up to each cut.
    """

    __slots__ = ("ends", "keys", "text")

    def __init__(self, text: str, end: str) -> None:
        self.text = text
        pieces = text.split(end)[:-1] if end else []
        self.keys = list(accumulate(pieces, lambda key, piece: hash((key, piece)), initial=0))[1:]
        self.ends = list(accumulate(len(piece) + len(end) for piece in pieces))


class PrefixTokens:
    """Token ids of beginnings of texts, the least recently used dropped first.

    Of a growing conversation only the latest beginning is kept, and the first piece of every text, which
    conversations share.

    Args:
        max_bytes: Bytes kept, estimated.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[int, tuple[Prefix, int]] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def held_bytes(self) -> int:
        """Estimated bytes held."""
        return self._bytes

    def longest(self, segments: Segments) -> tuple[int, Prefix | None]:
        """The longest beginning that is known, as the number of pieces in it."""
        for count in range(len(segments.keys), 0, -1):
            found = self._kept.get(segments.keys[count - 1])
            if found is not None:
                self._kept.move_to_end(segments.keys[count - 1])
                self.hits += 1
                return count, found[0]
        self.misses += 1
        return 0, None

    def keep(self, segments: Segments, count: int, tokens: bytes, *, after: int) -> Prefix:
        """Remember the tokens of the first `count` pieces, in the place of those of the first `after`."""
        if after > _FIRST and after != count:
            self._drop(segments.keys[after - 1])
        prefix = Prefix(tokens)
        key = segments.keys[count - 1]
        self._drop(key)
        size = 2 * prefix.size  # block hashes come later
        self._kept[key] = (prefix, size)
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))
        return prefix

    def _drop(self, key: int) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._bytes -= found[1]
