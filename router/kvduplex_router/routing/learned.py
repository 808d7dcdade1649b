"""What was sent where: the router's own memory of prompts, for engines whose events cannot be had or believed.

Prompts are remembered in units of 64 tokens, in two generations an engine. What is used moves to the young one; when
that has had as many units as half the engine's cache, the old one dies and the young one becomes old. So about as much
is remembered as the engine itself can, the most recently used. The dying one is cleared a little with every prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from kvduplex_router.events.index import overlaps_of
from kvduplex_router.events.table import TableFullError, WordTable

__all__ = ["UNIT", "LearnedPrefixes"]

UNIT: Final = 64
"""Tokens."""

_GENERATIONS: Final = 3
_TIDIED: Final = 64


class _Memory:
    """One engine's generations: young, old, dying; of each its bit and the units that have it."""

    __slots__ = ("bits", "engine", "units")

    def __init__(self, engine: str, slot: int) -> None:
        self.engine = engine
        self.bits = [_GENERATIONS * slot + generation for generation in range(_GENERATIONS)]
        self.units: list[array[int]] = [array("Q") for _ in range(_GENERATIONS)]


class LearnedPrefixes:
    """See the module.

    Args:
        max_units: Different units over all engines.
        max_engines: Engines.
        engine_tokens: Tokens per engine.
    """

    def __init__(self, *, max_units: int, max_engines: int, engine_tokens: int) -> None:
        words = -(-_GENERATIONS * max_engines // 64)
        self._units = WordTable(max_units, words=words, fixed=True)
        self._free = list(range(max_engines - 1, -1, -1))
        self._memories: dict[str, _Memory] = {}
        self._by_bit: dict[int, str] = {}
        self._generation = max(1, engine_tokens // UNIT // 2)
        self.full = 0

    def __len__(self) -> int:
        return len(self._units)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._units.nbytes

    def sent(self, engine: str, units: Sequence[int]) -> None:
        """A prompt went to an engine, which will hold it."""
        memory = self._memories.get(engine)
        if memory is None:
            if not self._free:
                self.full += 1
                return
            slot = self._free.pop()
            memory = self._memories[engine] = _Memory(engine, slot)
            self._by_bit.update(dict.fromkeys(memory.bits[:-1], engine))
        self._clear(memory, -1, 2 * len(units) + _TIDIED)
        self._enter(memory, units)
        if len(memory.units[0]) >= self._generation:
            self._turn(memory)

    def age(self) -> None:
        """All engines begin a new generation; what was not sent for two of them is forgotten."""
        for memory in self._memories.values():
            if any(memory.units):
                self._turn(memory)

    def overlaps(self, units: Sequence[int]) -> dict[str, int]:
        """Leading units of a prompt that each engine was sent before."""
        found: dict[str, int] = {}
        for bit, count in overlaps_of(self._units, units).items():
            engine = self._by_bit.get(bit)
            if engine is not None and count > found.get(engine, 0):
                found[engine] = count
        return found

    def forget(self, engine: str) -> None:
        """An engine lost what it held, or left the fleet."""
        memory = self._memories.pop(engine, None)
        if memory is None:
            return
        for generation, bit in enumerate(memory.bits):
            self._by_bit.pop(bit, None)
            self._clear(memory, generation, len(memory.units[generation]))
        self._free.append(min(memory.bits) // _GENERATIONS)

    def _enter(self, memory: _Memory, units: Iterable[int]) -> None:
        bit, young = memory.bits[0], memory.units[0]
        word, shift = divmod(bit, 64)
        row, mask = self._units.row, 1 << bit
        try:
            for unit in units:
                if not row(unit) & mask:
                    self._units.set_bits(unit, 1 << shift, word)
                    young.append(unit)
        except TableFullError:
            self.full += 1
            self._turn(memory)

    def _turn(self, memory: _Memory) -> None:
        self._clear(memory, -1, len(memory.units[-1]))
        memory.bits = [memory.bits[-1], *memory.bits[:-1]]
        memory.units = [memory.units[-1], *memory.units[:-1]]
        self._by_bit[memory.bits[0]] = memory.engine
        del self._by_bit[memory.bits[-1]]

    def _clear(self, memory: _Memory, generation: int, budget: int) -> None:
        """Take up to `budget` units out of a generation."""
        units = memory.units[generation]
        if not units or budget <= 0:
            return
        word, shift = divmod(memory.bits[generation], 64)
        for unit in units[-budget:]:
            self._units.clear_bits(unit, 1 << shift, word)
        del units[-budget:]
