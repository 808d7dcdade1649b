"""Which blocks are pinned, by how many leases: pure reference counts, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["PinCounts"]


class PinCounts:
    """Counts how many leases want each block, and remembers the blocks that nobody wants any more.

    Leases of one conversation share the blocks of their common history, so a block is pinned once for all of them and
    comes loose with the last. Loose blocks wait for `take_loose`, because only the engine's scheduler thread may give
    blocks back while leases end on other threads.
    """

    __slots__ = ("_counts", "_loose")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._loose: list[int] = []

    def __len__(self) -> int:
        """Blocks pinned now."""
        return len(self._counts)

    @property
    def any_loose(self) -> bool:
        """Whether `take_loose` would return something."""
        return bool(self._loose)

    def missing(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are not pinned yet."""
        return sum(block not in self._counts for block in set(blocks))

    def fitting(self, blocks: Sequence[int], room: int) -> int:
        """Length of the longest prefix of `blocks` that adds at most `room` pinned blocks."""
        added: set[int] = set()
        for length, block in enumerate(blocks):
            if block not in self._counts:
                added.add(block)
                if len(added) > room:
                    return length
        return len(blocks)

    def pin(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Count one more lease on each block and return those that had none before."""
        fresh = []
        for block in blocks:
            count = self._counts.get(block, 0)
            if not count:
                fresh.append(block)
            self._counts[block] = count + 1
        return tuple(fresh)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Count one lease less on each block; those with none left come loose, the last block first.

        An engine evicts what is given back first soonest, and the end of a sequence is what others share least.
        """
        for block in reversed(blocks):
            count = self._counts[block] - 1
            if count:
                self._counts[block] = count
            else:
                del self._counts[block]
                self._loose.append(block)

    def take_loose(self) -> list[int]:
        """Blocks that came loose since the last call, in the order to give them back."""
        loose, self._loose = self._loose, []
        return loose
