"""What an engine says it is, and whether two engines may hand KV to each other. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["Load", "Traits", "conflict", "read_load", "read_ranks", "read_traits"]

_CACHE_CONFIG: Final = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
_RANK: Final = re.compile(r'[{,](?:engine|dp_rank)="([0-9]{1,4})"')


class Traits(msgspec.Struct, frozen=True):
    """What must be equal on both sides of a transfer; None is not known and contradicts nothing.

    Attributes:
        server: ``vllm`` or ``sglang``.
        version: Of the server, without local build labels.
        model: What the engine loaded: a path or an id with its revision, as the engine spells it.
        block_size: Tokens in a block of KV.
        cache_dtype: Of the KV.
        names: Names under which it serves the model.
    """

    server: str | None = None
    version: str | None = None
    model: str | None = None
    block_size: int | None = None
    cache_dtype: str | None = None
    names: tuple[str, ...] = ()


class Load(msgspec.Struct, frozen=True):
    """What an engine last said of its load; None is not known, which is not 0.

    Attributes:
        running: Requests being computed.
        waiting: Requests queued in the engine.
        kv_usage: Part of its KV blocks that are in use, 0 to 1.
        at: Monotonic seconds of the answer.
    """

    running: float | None
    waiting: float | None
    kv_usage: float | None
    at: float


_COMPARED: Final = (
    ("server", "server"),
    ("version", "version"),
    ("model", "model"),
    ("block_size", "block size"),
    ("cache_dtype", "KV dtype"),
)


def conflict(one: Traits, other: Traits) -> str | None:
    """Why blocks of `one` mean nothing to `other`, e.g. ``block size 16 against 32``; None when nothing says so."""
    for name, shown in _COMPARED:
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine is not None and theirs is not None and mine != theirs:
            return f"{shown} {mine} against {theirs}"
    return None


def read_traits(
    *, models: object = None, version: object = None, server_info: object = None, exposition: str = ""
) -> Traits:
    """Put together what an engine's endpoints said.

    Args:
        models: JSON of ``/v1/models``.
        version: JSON of vLLM's ``/version``.
        server_info: JSON of SGLang's ``/get_server_info``.
        exposition: Text of ``/metrics``.
    """
    entries = _entries(models)
    root = next((entry.get("root") for entry in entries if not entry.get("parent")), None)
    names = tuple(str(entry["id"]) for entry in entries if isinstance(entry.get("id"), str))
    if isinstance(server_info, Mapping):
        return _sglang(server_info, root, names)
    cache = _cache_config(exposition)
    said = version.get("version") if isinstance(version, Mapping) else None
    block_size = cache.get("block_size", "")
    return Traits(
        server="vllm" if cache or said is not None else None,
        version=_public(said),
        model=root if isinstance(root, str) else None,
        block_size=int(block_size) if block_size.isdigit() else None,
        cache_dtype=cache.get("cache_dtype"),
        names=names,
    )


def _sglang(info: Mapping[str, Any], root: object, names: tuple[str, ...]) -> Traits:
    path, page, dtype = info.get("model_path", root), info.get("page_size"), info.get("kv_cache_dtype")
    revision = info.get("revision")
    model = f"{path}@{revision}" if isinstance(path, str) and isinstance(revision, str) else path
    return Traits(
        server="sglang",
        version=_public(info.get("version")),
        model=model if isinstance(model, str) else None,
        block_size=page if isinstance(page, int) else None,
        cache_dtype=dtype if isinstance(dtype, str) else None,
        names=names,
    )


def _entries(models: object) -> list[Mapping[str, Any]]:
    data = models.get("data") if isinstance(models, Mapping) else None
    return [entry for entry in data if isinstance(entry, Mapping)] if isinstance(data, list) else []


def _cache_config(exposition: str) -> dict[str, str]:
    found = _CACHE_CONFIG.search(exposition)
    return {} if found is None else dict(_LABEL.findall(found[1]))


def _public(version: object) -> str | None:
    return version.partition("+")[0] if isinstance(version, str) else None


_RUNNING: Final = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING: Final = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")


def read_load(exposition: str, at: float, *, rank: int | None = None) -> Load:
    """Load from an engine's metrics.

    Args:
        exposition: Text of ``/metrics``.
        at: Monotonic seconds of it.
        rank: The data-parallel rank whose load is asked for. Without, amounts of all add up, and of their KV use the
            largest counts.
    """
    running, waiting, usage = (_values(exposition, names, rank) for names in (_RUNNING, _WAITING, _USAGE))
    return Load(sum(running) if running else None, sum(waiting) if waiting else None, max(usage) if usage else None, at)


def read_ranks(exposition: str) -> frozenset[int]:
    """The data-parallel ranks that a vLLM server counts requests for; empty when it does not say."""
    return frozenset(rank for line in _lines(exposition, _RUNNING[0]) if (rank := _rank(line)) is not None)


def _values(exposition: str, names: tuple[str, ...], rank: int | None) -> list[float]:
    """Samples of the first of `names` that has any; where a rank is given, its own."""
    for name in names:
        lines = (line for line in _lines(exposition, name) if rank is None or _rank(line) == rank)
        found = [value for line in lines if (value := _number(line.rpartition(" ")[2])) is not None]
        if found:
            return found
    return []


def _rank(sample: str) -> int | None:
    """The data-parallel rank that a sample names: vLLM's label ``engine``, SGLang's ``dp_rank``."""
    found = _RANK.search(sample)
    return None if found is None else int(found[1])


def _lines(exposition: str, name: str) -> list[str]:
    """A metric's samples; searched as text, for an exposition has a hundred kilobytes."""
    found: list[str] = []
    at = exposition.find(f"\n{name}")
    while at >= 0:
        line = exposition[at + 1 : exposition.find("\n", at + 1)]
        if line[len(name) : len(name) + 1] in ("{", " "):
            found.append(line)
        at = exposition.find(f"\n{name}", at + 1)
    return found


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
