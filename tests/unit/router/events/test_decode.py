"""Event batches in every encoding that engines use, and in none."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.events.decode import BadEventError, Batch, Cleared, Removed, Stored, decode_batch
from kvduplex_router.events.hashing import token_bytes

pack = msgspec.msgpack.encode
HASH = b"\x01" * 32


def one(event: Any) -> Any:
    (found,) = decode_batch(pack([1.5, [event], 0])).events
    return found


def test_the_map_encoding_of_vllm() -> None:
    event = {
        "type": "BlockStored", "block_hashes": [HASH], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2,
        "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["salt"]], "group_idx": 0,
        "kv_cache_spec_kind": "full_attention", "something_new": {"a": 1},
    }  # fmt: skip
    assert one(event) == Stored([HASH], None, token_bytes([1, 2]), 2, [("salt",)], None, True, True, 0)


def test_the_array_encoding_of_older_vllm() -> None:
    event = ["BlockStored", [HASH], b"\x02" * 32, [1, 2], 2, None, "GPU", None]
    assert one(event) == Stored([HASH], b"\x02" * 32, token_bytes([1, 2]), 2, None, None, True, True, 0)


def test_events_of_sglang_have_integer_hashes_and_no_medium() -> None:
    assert one(["BlockStored", [-7, 9], 3, [1, 2, 3, 4], 2, None]).names == [-7, 9]
    assert one(["BlockRemoved", [-7]]) == Removed([-7], True, 0)
    assert one(["AllBlocksCleared"]) == Cleared()


def test_blocks_elsewhere_than_in_the_accelerator_and_of_partial_groups_are_told_apart() -> None:
    stored = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    assert not one({**stored, "medium": "CPU"}).device
    assert not one({**stored, "kv_cache_spec_kind": "sliding_window"}).whole
    assert one({**stored, "group_idx": 3}).group == 3
    assert one({**stored, "lora_name": "adapter"}).extras == [("adapter",)]


def test_unknown_kinds_are_skipped_and_counted() -> None:
    batch = decode_batch(pack([0, [{"type": "BlockMoved"}, ["AllBlocksCleared"]]]))
    assert batch == Batch([Cleared()], 1)


@pytest.mark.parametrize(
    "event",
    [
        {"block_hashes": []},
        {"type": "BlockStored", "block_hashes": "x", "token_ids": [], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": ["a"], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [2**32], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 0},
        {"type": "BlockRemoved", "block_hashes": [None]},
        7,
        [],
    ],
)
def test_malformed_events_are_errors(event: Any) -> None:
    with pytest.raises(BadEventError):
        decode_batch(pack([0, [event]]))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=20,
)
NAMES = ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
FIELDS = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_name",
    "medium",
    "extra_keys",
    "group_idx",
]
EVENTS = st.builds(
    lambda kind, fields: {"type": kind, **fields},
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(FIELDS), VALUES),
) | st.builds(lambda kind, rest: [kind, *rest], st.sampled_from(NAMES), st.lists(VALUES, max_size=9))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_an_error(payload: bytes) -> None:
    with contextlib.suppress(BadEventError):
        assert isinstance(decode_batch(payload), Batch)


@given(st.lists(EVENTS | VALUES, max_size=4))
def test_anything_like_an_event_is_read_or_refused(events: list[Any]) -> None:
    try:
        batch = decode_batch(pack([0.0, events]))
    except BadEventError:
        return
    for event in batch.events:
        if isinstance(event, Stored) and event.extras is not None:
            hash(tuple(event.extras))
