"""Writes traces out as chat messages."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvduplex_bench.traces.model import Segment

__all__ = ["Writer"]

_REMEMBERED: Final = 4096
_PIECE: Final = 400
_PIECES: Final = 997


class Writer:
    """Turns named content into text; the same name gives the same text in every run.

    Args:
        words: Words, each about a token long with the space before it.
    """

    def __init__(self, words: Sequence[str]) -> None:
        chance = random.Random("words")
        self._pieces = ["".join(chance.choices(words, k=_PIECE)) for _ in range(_PIECES)]
        self._words = words
        self._written: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def message(self, segment: Segment) -> bytes:
        """A message as JSON."""
        key = (segment.key, segment.tokens)
        found = self._written.get(key)
        if found is None:
            content = self.text(segment) if segment.text is None else segment.text
            role = "user" if segment.role == "tool" else segment.role
            found = self._written[key] = json.dumps({"role": role, "content": content}).encode()
            if len(self._written) > _REMEMBERED:
                self._written.popitem(last=False)
        return found

    def text(self, segment: Segment) -> str:
        """Content of about `segment.tokens` tokens, of pieces in an order that its key decides."""
        chance = random.Random(segment.key)
        opening = "".join(chance.choices(self._words, k=min(16, segment.tokens)))
        left, parts = segment.tokens - 16, [opening]
        while left > 0:
            piece = chance.choice(self._pieces)
            parts.append(piece if left >= _PIECE else " " + " ".join(piece.split()[:left]))
            left -= _PIECE
        return "".join(parts).strip()
