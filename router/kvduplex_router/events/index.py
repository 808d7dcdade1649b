"""Which engines hold which blocks, as their events said.

A block is known by the router's own hash; its row has one bit per engine. Engines name blocks by hashes of their own,
so each engine has a second table from its names to ours. An engine whose blocks all go at once gets a fresh bit, and
its old one is cleared a little at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from kvduplex_router.events.hashing import TOKEN_BYTES, Extra, chain, root
from kvduplex_router.events.table import TableFullError, WordTable

__all__ = ["BlockIndex", "IndexCounts", "TooManyEnginesError", "name64", "overlaps_of"]

_WORD_BITS: Final = 64
_TIDIED_PER_EVENT: Final = 64
_MASK64: Final = (1 << 64) - 1

BlockName = int | bytes | str


class TooManyEnginesError(Exception):
    """The index has no bit left for another engine."""


class IndexCounts:
    """What happened to events, by kind; all only grow."""

    __slots__ = ("full", "orphaned", "other", "removed", "stored", "unknown")

    def __init__(self) -> None:
        self.stored = 0  # blocks entered
        self.removed = 0  # blocks taken out
        self.orphaned = 0  # blocks whose parent is not known, as after late subscription
        self.unknown = 0  # removals of blocks that are not known
        self.other = 0  # blocks of another cache group, size or medium than is indexed
        self.full = 0  # blocks left out because the index is full


def name64(name: BlockName) -> int:
    """An engine's block hash as 64 bits that are not 0."""
    if isinstance(name, str):
        name = name.encode("utf-8", "surrogatepass")
    if isinstance(name, bytes):
        name = int.from_bytes(name[-8:], "big") if len(name) >= 8 else hash(name)  # noqa: PLR2004 - 64 bits
    return name & _MASK64 or 1


class _EngineBlocks:
    """One engine's blocks: its names for them, and how many copies of a block it holds beyond the first."""

    __slots__ = ("block_size", "copies", "names", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.names = WordTable()
        self.copies: dict[int, int] = {}
        self.block_size = 0


class BlockIndex:
    """See the module.

    Args:
        max_blocks: Different blocks that are kept; further ones are left out and counted.
        max_engines: Engines at a time, a multiple of 64.

    Attributes:
        adapters: LoRA adapters that blocks were seen of.
        counts: What happened to events.
        on_cleared: Told of engines that lost all their blocks.
    """

    def __init__(self, *, max_blocks: int, max_engines: int = 256) -> None:
        self._words = -(-max_engines // _WORD_BITS)
        self._blocks = WordTable(max_blocks, words=self._words, fixed=True)
        self._engines: dict[str, _EngineBlocks] = {}
        self._free = list(range(self._words * _WORD_BITS - 1, -1, -1))
        self._by_slot: dict[int, str] = {}
        self._retired: deque[tuple[int, Iterator[int]]] = deque()
        self.adapters: set[str] = set()
        self.counts = IndexCounts()
        self.on_cleared: Callable[[str], None] = lambda _engine: None

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, of which what was never used is not backed by memory."""
        return self._blocks.nbytes + sum(engine.names.nbytes for engine in self._engines.values())

    @property
    def block_sizes(self) -> set[int]:
        """Block sizes of engines that have blocks."""
        return {engine.block_size for engine in self._engines.values() if engine.block_size}

    def sizes(self) -> Mapping[str, int]:
        """Blocks by engine."""
        return {name: len(engine.names) for name, engine in self._engines.items()}

    def block_size(self, engine: str) -> int:
        """Tokens per block of an engine; 0 when it is not known yet."""
        known = self._engines.get(engine)
        return 0 if known is None else known.block_size

    def stored(
        self,
        engine: str,
        names: Sequence[BlockName],
        parent: BlockName | None,
        tokens: bytes,
        block_size: int,
        extras: Sequence[Extra] | Extra = None,
    ) -> None:
        """An engine has these consecutive blocks.

        Args:
            engine: Its name.
            names: Its hashes of the blocks, in order.
            parent: Its hash of the block before them; None when they begin a prompt.
            tokens: Token ids of all of them, as `kvduplex_router.events.hashing.token_bytes` packs them.
            block_size: Tokens per block.
            extras: What besides tokens makes them, see `kvduplex_router.events.hashing.chain`.

        Raises:
            TooManyEnginesError: There is no room for another engine.
        """
        self.tidy(_TIDIED_PER_EVENT)
        known = self._known(engine)
        known.block_size = known.block_size or block_size
        if block_size != known.block_size or len(tokens) != len(names) * block_size * TOKEN_BYTES:
            self.counts.other += len(names)
            return
        above = root(block_size) if parent is None else known.names.get(name64(parent))
        if above is None:
            self.counts.orphaned += len(names)
            return
        own = chain(above, tokens, block_size, extras)
        self._enter(known, [name64(name) for name in names], own)

    def removed(self, engine: str, names: Sequence[BlockName]) -> None:
        """An engine no longer has these blocks."""
        known = self._engines.get(engine)
        if known is None:
            self.counts.unknown += len(names)
            return
        word, bit = divmod(known.slot, _WORD_BITS)
        for name in map(name64, names):
            if (copies := known.copies.pop(name, 0)) > 1:
                known.copies[name] = copies - 1
            if copies:
                continue
            own = known.names.pop(name)
            if own is None:
                self.counts.unknown += 1
                continue
            self._blocks.clear_bits(own, 1 << bit, word)
            self.counts.removed += 1

    def cleared(self, engine: str) -> None:
        """An engine has no blocks any more."""
        self.on_cleared(engine)
        known = self._engines.pop(engine, None)
        if known is None:
            return
        del self._by_slot[known.slot]
        self._retired.append((known.slot, known.names.values()))
        self.counts.removed += len(known.names)
        if not self._free:
            self.tidy(len(self._blocks) + 1)

    def forget(self, engine: str) -> None:
        """An engine left the fleet."""
        self.cleared(engine)

    def tidy(self, budget: int) -> bool:
        """Clear up to `budget` old bits of engines that were cleared; False when nothing is left to clear."""
        if not self._retired:
            return False
        slot, owns = self._retired[0]
        word, bit = divmod(slot, _WORD_BITS)
        done = 0
        for own in islice(owns, budget):
            self._blocks.clear_bits(own, 1 << bit, word)
            done += 1
        if done < budget:
            self._retired.popleft()
            self._free.append(slot)
        return True

    def overlaps(self, blocks: Sequence[int]) -> dict[str, int]:
        """How many leading blocks of a chain each engine holds; engines that hold none are left out."""
        found = overlaps_of(self._blocks, blocks)
        by_slot = self._by_slot
        return {by_slot[slot]: count for slot, count in found.items() if slot in by_slot}

    def _known(self, engine: str) -> _EngineBlocks:
        known = self._engines.get(engine)
        if known is None:
            if not self._free:
                raise TooManyEnginesError(f"the block index has room for {self._words * _WORD_BITS} engines")
            known = self._engines[engine] = _EngineBlocks(self._free.pop())
            self._by_slot[known.slot] = engine
        return known

    def _enter(self, known: _EngineBlocks, names: list[int], own: list[int]) -> None:
        word, bit = divmod(known.slot, _WORD_BITS)
        bits, table = 1 << bit, known.names
        for name, block in zip(names, own, strict=True):
            if not table.put_new(name, block):
                known.copies[name] = known.copies.get(name, 0) + 1
                continue
            try:
                self._blocks.set_bits(block, bits, word)
            except TableFullError:
                table.pop(name)
                self.counts.full += 1
                return  # what follows could not be found without this one
            self.counts.stored += 1


def overlaps_of(table: WordTable, blocks: Sequence[int]) -> dict[int, int]:
    """Leading blocks of a chain by bit.

    Whoever holds a block is taken to hold those before it: engines give up the ends of chains first. So the places
    where holders drop out are found by halving, and a long chain costs a few look-ups for each of them.
    """
    found: dict[int, int] = {}
    row = table.row
    first = row(blocks[0]) if blocks else 0
    if not first:
        return found
    last = row(blocks[-1]) & first
    _note(found, last, len(blocks))
    pending = [(0, first, len(blocks) - 1, last)]
    while pending:
        low, held, high, left = pending.pop()
        if held == left:
            continue
        if high - low == 1:
            _note(found, held & ~left, high)
            continue
        middle = (low + high) // 2
        between = row(blocks[middle]) & held | left
        pending += ((low, held, middle, between), (middle, between, high, left))
    return found


def _note(found: dict[int, int], bits: int, count: int) -> None:
    while bits:
        low = bits & -bits
        found[low.bit_length() - 1] = count
        bits ^= low
