"""Byte-level byte-pair encoding, trained here so that every machine gets the same merges without a download.

A library's trainer is not used because its tie-breaking may change between releases, and one changed merge changes
every generated file. The procedure is that of Sennrich et al., "Neural Machine Translation of Rare Words with Subword
Units" (2016), over the byte alphabet published with GPT-2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

__all__ = ["BYTE_ALPHABET", "Merge", "to_symbols", "train"]

Merge = tuple[str, str]


def _byte_alphabet() -> tuple[str, ...]:
    """One printable character for each byte value: itself where it is printable, else one from U+0100 upwards."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return tuple(chr(value if value in printable else next(hidden)) for value in range(256))


BYTE_ALPHABET = _byte_alphabet()


def to_symbols(text: str) -> tuple[str, ...]:
    """The text's UTF-8 bytes, each as its character of `BYTE_ALPHABET`."""
    return tuple(BYTE_ALPHABET[value] for value in text.encode())


def train(frequencies: Mapping[str, int], max_merges: int) -> tuple[Merge, ...]:
    """Merge the most frequent neighbours until nothing is left to merge.

    Args:
        frequencies: Pre-tokenised pieces, e.g. ``" river"``, with their number of occurrences.
        max_merges: Upper bound for the merges returned.

    Returns:
        Merges in the order they were found. Of equally frequent pairs the lexicographically smallest comes first.
    """
    pieces = {to_symbols(piece): count for piece, count in sorted(frequencies.items())}
    merges: list[Merge] = []
    while len(merges) < max_merges:
        pairs = _count_pairs(pieces.items())
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        pieces = {_merge(symbols, best): count for symbols, count in pieces.items()}
    return tuple(merges)


def _count_pairs(pieces: Iterable[tuple[tuple[str, ...], int]]) -> Counter[Merge]:
    pairs: Counter[Merge] = Counter()
    for symbols, count in pieces:
        for pair in pairwise(symbols):
            pairs[pair] += count
    return pairs


def _merge(symbols: tuple[str, ...], pair: Merge) -> tuple[str, ...]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] = "".join(pair)
        else:
            merged.append(symbol)
    return tuple(merged)
