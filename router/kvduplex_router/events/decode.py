"""Event batches as engines publish them, read without trusting a byte.

vLLM sends ``[timestamp, events, data_parallel_rank]`` in MessagePack. Each event is a map with its ``type`` (from 0.24)
or an array that begins with it (before). SGLang sends arrays of the same kinds. Fields that are not known are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvduplex_router.events.hashing import Extra, token_bytes
from kvduplex_router.events.index import BlockName

__all__ = ["BadEventError", "Batch", "Cleared", "Removed", "Stored", "decode_batch"]

_MEDIUM_OF_DEVICE: Final = frozenset({None, "", "GPU", "gpu"})
_PARTIAL_KINDS: Final = ("sliding", "mamba", "chunked", "ssm")
_BLOCKS_MAX: Final = 1 << 20
_ARRAY_FIELDS: Final = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip


class BadEventError(ValueError):
    """A payload is not an event batch, or one of its events is malformed."""


class Stored(msgspec.Struct, frozen=True):
    """Consecutive blocks entered the cache.

    Attributes:
        names: The engine's hashes.
        parent: The hash before them; None when they begin a prompt.
        tokens: Token ids, packed.
        block_size: Tokens per block.
        extras: What besides tokens makes each block; None when nothing does.
        adapter: LoRA adapter's name.
        device: Whether the blocks are in the accelerator's memory.
        whole: Whether the group keeps all of a prompt's blocks, unlike sliding windows.
        group: Cache group.
    """

    names: list[BlockName]
    parent: BlockName | None
    tokens: bytes
    block_size: int
    extras: list[Extra] | None
    adapter: str | None
    device: bool
    whole: bool
    group: int


class Removed(msgspec.Struct, frozen=True):
    """Blocks left the cache; fields as in `Stored`."""

    names: list[BlockName]
    device: bool
    group: int


class Cleared(msgspec.Struct, frozen=True):
    """All blocks left the cache."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True):
    """What one message carried.

    Attributes:
        events: In order.
        skipped: Events of kinds that are not known.
        rank: The data-parallel rank that sent it; None when it does not say.
    """

    events: list[Event]
    skipped: int
    rank: int | None = None


_DECODER: Final = msgspec.msgpack.Decoder()


def decode_batch(payload: bytes) -> Batch:
    """Read one message.

    Raises:
        BadEventError: It is not an event batch, or one of its events is malformed.
    """
    try:
        value = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadEventError(f"not MessagePack: {error}") from None
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[1], list):  # noqa: PLR2004 - ts, events
        raise BadEventError("not [timestamp, events, ...]")
    events = [_event(each) for each in value[1]]
    known = [event for event in events if event is not None]
    return Batch(known, len(events) - len(known), _sender(value))


def _sender(value: list[Any]) -> int | None:
    rank = value[2] if len(value) > 2 else None  # noqa: PLR2004 - see `decode_batch`
    return rank if isinstance(rank, int) and not isinstance(rank, bool) else None


def _event(value: object) -> Event | None:
    kind, fields = _fields(value)
    match kind:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return Removed(_names(fields.get("block_hashes")), _device(fields), _group(fields))
        case "AllBlocksCleared":
            return Cleared()
        case _:
            return None


def _fields(value: object) -> tuple[str, Mapping[str, Any]]:
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str):
            return kind, value
    elif isinstance(value, list) and value and isinstance(value[0], str):
        return value[0], dict(zip(_ARRAY_FIELDS.get(value[0], ()), value[1:], strict=False))
    raise BadEventError("an event has no type")


def _stored(fields: Mapping[str, Any]) -> Stored:
    names, tokens, block_size = _names(fields.get("block_hashes")), fields.get("token_ids"), fields.get("block_size")
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size <= 0:
        raise BadEventError("block_size is not a positive integer")
    try:
        packed = token_bytes(tokens if isinstance(tokens, list) else [None])
    except (TypeError, OverflowError):
        raise BadEventError("token_ids is not a list of 32-bit integers") from None
    adapter = fields.get("lora_name")
    adapter = adapter if isinstance(adapter, str) and adapter else None
    parent = fields.get("parent_block_hash")
    return Stored(
        names,
        None if parent is None else _name(parent),
        packed,
        block_size,
        _extras(fields.get("extra_keys"), len(names), adapter),
        adapter,
        _device(fields),
        not str(fields.get("kv_cache_spec_kind") or "").lower().startswith(_PARTIAL_KINDS),
        _group(fields),
    )


def _names(value: object) -> list[BlockName]:
    if not isinstance(value, list) or len(value) > _BLOCKS_MAX:
        raise BadEventError("block_hashes is not a list of reasonable length")
    return [_name(each) for each in value]


def _name(value: object) -> BlockName:
    if isinstance(value, (int, bytes, str)) and not isinstance(value, bool):
        return value
    raise BadEventError("a block hash is neither an integer nor bytes")


def _device(fields: Mapping[str, Any]) -> bool:
    medium = fields.get("medium")
    return (medium is None or isinstance(medium, str)) and medium in _MEDIUM_OF_DEVICE


def _group(fields: Mapping[str, Any]) -> int:
    group = fields.get("group_idx")
    return group if isinstance(group, int) and not isinstance(group, bool) else 0


def _extras(value: object, count: int, adapter: str | None) -> list[Extra] | None:
    """Extra keys of each block, hashable; without any, the adapter alone makes the difference."""
    if not isinstance(value, list) or len(value) != count:
        return None if adapter is None else [(adapter,)] * count
    return [_frozen(each) if isinstance(each, Sequence) and each else None for each in value]


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    return value if isinstance(value, (str, bytes, int, float, type(None))) else repr(value)
