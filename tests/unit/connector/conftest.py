"""A block pool and requests that behave as the engine's do, for tests without an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class Pool:
    """Reference counts as in the engine's block pool; block 0 is its placeholder."""

    def __init__(self, size: int) -> None:
        self.blocks = [Block(number) for number in range(size)]
        self.blocks[0].is_null = True
        self.cached: set[bytes] = set()
        self.freed: list[int] = []

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            self.freed.append(block.block_id)

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt and not block.is_null for block in self.blocks)

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any:
        return [1] if block_hash in self.cached else None

    def reset_prefix_cache(self) -> bool:
        return not any(block.ref_cnt for block in self.blocks)

    def allocate(self, count: int) -> list[int]:
        chosen = [block for block in self.blocks[1:] if not block.ref_cnt][:count]
        assert len(chosen) == count, "the pool is exhausted"
        self.touch(chosen)
        return [block.block_id for block in chosen]


def hashes(tokens: Sequence[int], block_size: int) -> list[bytes]:
    chain, parent = [], b""
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        parent = hashlib.sha256(parent + repr(tokens[start : start + block_size]).encode()).digest()
        chain.append(parent)
    return chain


@dataclass
class Request:
    """A request with as much of the engine's shape as the connector reads."""

    tokens: list[int]
    output: int = 0
    request_id: str = "r"
    block_size: int = 4
    kv_transfer_params: dict[str, Any] | None = None
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    computed: int | None = None
    finished: str = "FINISHED_STOPPED"
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = hashes(self.tokens, self.block_size)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return self.output

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens) - self.output

    @property
    def num_computed_tokens(self) -> int:
        return len(self.tokens) - 1 if self.computed is None else self.computed

    @property
    def status(self) -> Any:
        return SimpleNamespace(name=self.finished)


@pytest.fixture
def pool() -> Pool:
    return Pool(65)


@pytest.fixture
def request_of() -> type[Request]:
    return Request
