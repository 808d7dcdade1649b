"""The block index against a naive model: sets of token prefixes by engine."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvduplex_router.events.hashing import chain, root, token_bytes
from kvduplex_router.events.index import BlockIndex, TooManyEnginesError, name64

SIZE = 4
ENGINES = ["a", "b", "c"]
PROMPTS = [[p // 4 + 1] * SIZE + [p % 4 + 10] * SIZE + [p] * SIZE * 2 for p in range(16)]
"""Four blocks each, sharing their first with four others; long common beginnings and late differences."""


def name(engine: str, tokens: tuple[int, ...]) -> bytes:
    """An engine's own hash of a block: any function of the tokens up to its end."""
    return random.Random(f"{engine}{tokens}").randbytes(32)


class Engine:
    """What a well-behaved engine does: stores chains from the front, evicts them from the end."""

    def __init__(self, engine: str, index: BlockIndex) -> None:
        self.engine, self.index = engine, index
        self.held: set[tuple[int, ...]] = set()

    def store(self, tokens: list[int], blocks: int) -> None:
        ends = [tuple(tokens[: (i + 1) * SIZE]) for i in range(blocks)]
        new = [end for end in ends if end not in self.held]
        if new:
            start = len(new[0]) - SIZE
            parent = None if start == 0 else name(self.engine, tuple(tokens[:start]))
            names = [name(self.engine, end) for end in new]
            self.index.stored(self.engine, names, parent, token_bytes(new[-1][start:]), SIZE)
            self.held.update(new)

    def evict(self, tokens: list[int], keep: int) -> None:
        mine = [
            end for end in self.held if len(end) > keep * SIZE and end[: keep * SIZE] == tuple(tokens[: keep * SIZE])
        ]
        self.index.removed(self.engine, [name(self.engine, end) for end in mine])
        self.held.difference_update(mine)

    def clear(self) -> None:
        self.index.cleared(self.engine)
        self.held.clear()

    def overlap(self, tokens: list[int]) -> int:
        count = 0
        while (count + 1) * SIZE <= len(tokens) and tuple(tokens[: (count + 1) * SIZE]) in self.held:
            count += 1
        return count


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "store", "evict", "clear"]),
            st.sampled_from(ENGINES),
            st.sampled_from(PROMPTS),
            st.integers(1, 4),
        ),
        max_size=60,
    )
)
def test_overlaps_are_those_of_the_model(steps: list[tuple[str, str, list[int], int]]) -> None:
    index = BlockIndex(max_blocks=1_000, max_engines=64)
    engines = {each: Engine(each, index) for each in ENGINES}
    for step, engine, prompt, blocks in steps:
        match step:
            case "store":
                engines[engine].store(prompt, blocks)
            case "evict":
                engines[engine].evict(prompt, blocks - 1)
            case _:
                engines[engine].clear()
    for prompt in PROMPTS:
        expected = {n: count for n, engine in engines.items() if (count := engine.overlap(prompt))}
        assert index.overlaps(chain(root(SIZE), token_bytes(prompt), SIZE)) == expected
    assert sum(index.sizes().values()) == sum(len(engine.held) for engine in engines.values())
    while index.tidy(1_000):
        pass
    assert len(index) == len(set().union(*(engine.held for engine in engines.values())))


def stored(index: BlockIndex, engine: str, tokens: list[int]) -> list[bytes]:
    ends = [tuple(tokens[: i + SIZE]) for i in range(0, len(tokens), SIZE)]
    names = [name(engine, end) for end in ends]
    index.stored(engine, names, None, token_bytes(tokens), SIZE)
    return names


def overlaps(index: BlockIndex, tokens: list[int]) -> dict[str, int]:
    return index.overlaps(chain(root(SIZE), token_bytes(tokens), SIZE))


def test_a_block_held_twice_is_gone_when_both_copies_are() -> None:
    index = BlockIndex(max_blocks=100)
    names = stored(index, "a", PROMPTS[0])
    stored(index, "a", PROMPTS[0])
    index.removed("a", names)
    assert overlaps(index, PROMPTS[0]) == {"a": 4}
    index.removed("a", names)
    assert overlaps(index, PROMPTS[0]) == {}


def test_blocks_of_a_parent_that_is_not_known_are_counted_and_left_out() -> None:
    index = BlockIndex(max_blocks=100)
    index.stored("a", [b"x" * 32], b"unknown parent hash", token_bytes([1] * SIZE), SIZE)
    assert index.counts.orphaned == 1
    assert len(index) == 0


def test_a_full_index_keeps_beginnings_and_takes_more_once_there_is_room() -> None:
    index = BlockIndex(max_blocks=4)
    stored(index, "a", PROMPTS[0])
    stored(index, "a", [9] * SIZE)
    assert (index.counts.full, overlaps(index, [9] * SIZE)) == (1, {})
    index.cleared("a")
    assert stored(index, "a", PROMPTS[5])
    assert overlaps(index, PROMPTS[5]) == {"a": 4}


def test_a_cleared_engine_counts_for_nothing_at_once_and_its_bits_are_used_again() -> None:
    index = BlockIndex(max_blocks=10_000, max_engines=64)
    for _ in range(200):
        stored(index, "a", PROMPTS[3])
        assert overlaps(index, PROMPTS[3]) == {"a": 4}
        index.cleared("a")
        assert overlaps(index, PROMPTS[3]) == {}


def test_more_engines_than_bits_are_refused_by_name() -> None:
    index = BlockIndex(max_blocks=1_000, max_engines=64)
    for i in range(64):
        stored(index, f"e{i}", PROMPTS[0])
    assert overlaps(index, PROMPTS[0]) == {f"e{i}": 4 for i in range(64)}
    with pytest.raises(TooManyEnginesError, match="64 engines"):
        stored(index, "one more", PROMPTS[0])


def test_adapters_and_salts_make_other_blocks() -> None:
    index = BlockIndex(max_blocks=100)
    tokens = token_bytes([1] * SIZE)
    index.stored("plain", [b"1" * 32], None, tokens, SIZE)
    index.stored("salted", [b"2" * 32], None, tokens, SIZE, [("pepper",)])
    assert index.overlaps(chain(root(SIZE), tokens, SIZE)) == {"plain": 1}
    assert index.overlaps(chain(root(SIZE), tokens, SIZE, [("pepper",)])) == {"salted": 1}


def test_integer_and_byte_names_of_one_block_are_one() -> None:
    raw = bytes(range(32))
    assert name64(raw) == name64(int.from_bytes(raw, "big"))
    assert name64(0) == 1
    assert name64(-5) == 2**64 - 5


def test_a_million_blocks_fit_where_five_million_may_take_a_gigabyte() -> None:
    """By what is allocated; fixed tables claim memory only as it is used, so this bounds it from above."""
    index = BlockIndex(max_blocks=40_000, max_engines=256)
    rng = random.Random(1)
    for i in range(80):
        tokens = [rng.randrange(150_000) for _ in range(500 * SIZE)]
        index.stored(f"e{i % 8}", [rng.randbytes(32) for _ in range(500)], None, token_bytes(tokens), SIZE)
    assert index.nbytes / 40_000 < 1e9 / 5e6
