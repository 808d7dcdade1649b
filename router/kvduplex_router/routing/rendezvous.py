"""Rendezvous hashing: everybody ranks the same engines the same way for a key, without telling each other.

An engine that joins takes over only the keys it ranks first for, and one that leaves gives only its own away. Bounded
load keeps a popular key from drowning its engine: an engine with more than its share is passed over for the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["SLACK", "Loaded", "bounded", "engine_seed", "key64", "ranked", "weights"]

_MASK: Final = (1 << 64) - 1
SLACK: Final = 2
"""Requests an engine may have beyond its share."""

_MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS: Final = (np.uint64(30), np.uint64(27))
_FACTORS: Final = tuple(map(np.uint64, _MIX))


class Loaded(Protocol):
    """What is ranked."""

    @property
    def name(self) -> str:
        """By which it is known everywhere."""

    @property
    def in_flight(self) -> int:
        """Requests it is serving."""


E = TypeVar("E", bound=Loaded)


def key64(*parts: bytes) -> int:
    """A key that is the same in every process."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


@lru_cache(maxsize=65_536)
def engine_seed(name: str) -> int:
    """What stands for an engine in ranks."""
    return key64(name.encode("utf-8", "surrogatepass"))


def _weight(seed: int, key: int) -> int:
    """A 64-bit mix (splitmix64's finaliser) of engine and key."""
    value = seed ^ key
    value = (value ^ value >> 30) * _MIX[0] & _MASK
    value = (value ^ value >> 27) * _MIX[1] & _MASK
    return value ^ value >> 31


def weights(seeds: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Ranks of many engines for a key, the highest preferred; the same as `ranked` goes by."""
    value = seeds ^ np.uint64(key)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        value = (value ^ value >> shift) * factor
    return value ^ value >> np.uint64(31)


def ranked(key: int, engines: Iterable[E]) -> list[E]:
    """Engines in the order in which the key prefers them."""
    return sorted(engines, key=lambda engine: _weight(engine_seed(engine.name), key), reverse=True)


def bounded(key: int, engines: Sequence[E], factor: float) -> E | None:
    """The most preferred engine that is not overloaded.

    Args:
        key: From `key64`.
        engines: Those that may be picked.
        factor: How much more than the mean load an engine may have.
    """
    if not engines:
        return None
    total = sum(engine.in_flight for engine in engines)
    limit = math.ceil(factor * (total + 1) / len(engines)) + SLACK
    within = [engine for engine in engines if engine.in_flight < limit]
    return max(within, key=lambda engine: _weight(engine_seed(engine.name), key))
