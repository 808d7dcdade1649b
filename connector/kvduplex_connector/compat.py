"""Everything that depends on vLLM's version or insides, in one place.

Compared with the sources of vLLM 0.29.0, 0.32.0 and 0.33.0. What the connector relies on beyond the public connector
interface stands here with the reason, so that a new version is checked by reading this file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import queue
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Final

from kvduplex_transfer.leases.errors import LeaseConfigError
from kvduplex_transfer.progress import resting_progress

__all__ = [
    "NOTICE_PREFIX",
    "SUPPORTED",
    "check_version",
    "engine_version",
    "fingerprint",
    "resting_agent",
    "scheduler_wakeup",
    "share_logging",
    "source_sizes",
    "unsupported_layout",
]

SUPPORTED: Final = ((0, 29), (0, 33))
"""First and last vLLM minor version the connector runs on."""

NOTICE_PREFIX: Final = "HB:kvduplex-claim-"
"""Begins the request id that a claimed read reports when it ends.

A reader's worker always notifies the owner's worker. Claims end over the lease protocol instead, since a notice
cannot tell two readers of one lease apart. Addressed as a heartbeat for a request nobody knows, the notice is ignored
without a word; under any other name the owner would log an error (nixl/pull_worker.py, ``_get_new_notifs``).
"""

_PROVING_HASHES: Final = frozenset({"sha256", "sha256_cbor"})


def engine_version() -> str:
    """VLLM's version."""
    import vllm  # noqa: PLC0415 - the one door to vLLM's own package, so that checks run without it

    return str(vllm.__version__)


def check_version(version: str) -> None:
    """Refuse a vLLM this connector was not compared with.

    Raises:
        LeaseConfigError: It is outside `SUPPORTED`.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    (low_major, low), (high_major, high) = SUPPORTED
    if match is None or not (low_major, low) <= (int(match[1]), int(match[2])) <= (high_major, high):
        raise LeaseConfigError(
            f"vLLM {version}: kvduplex_connector supports {low_major}.{low} to {high_major}.{high}; install one of "
            "these, or serve with the stock NixlConnector"
        )


def resting_agent(worker: bool, extra_config: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within it, the base connector's worker creates a NIXL agent whose progress thread does not take a core.

    Args:
        worker: Whether this process creates one.
        extra_config: ``kv_connector_extra_config``; ``backends`` names NIXL's backends, UCX when absent.
    """
    backends = extra_config.get("backends", ["UCX"])
    if not worker or set(backends) != {"UCX"}:  # and NIXL need not be there
        return contextlib.nullcontext()
    # By vLLM's own name for it: it sets UCX's environment before the first import of NIXL.
    agent = importlib.import_module("vllm.distributed.nixl_utils").NixlWrapper
    return (
        contextlib.nullcontext() if agent is None else resting_progress(agent, backends)
    )  # vLLM says itself what is missing


def fingerprint(vllm_config: Any, kv_cache_config: Any) -> bytes:
    """32 bytes that are equal on engines whose blocks hold the same KV for the same block hash.

    Raises:
        LeaseConfigError: The block hash is not proof against collisions.
    """
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed  # noqa: PLC0415

    cache, model = vllm_config.cache_config, vllm_config.model_config
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in _PROVING_HASHES:
        raise LeaseConfigError(
            f"prefix_caching_hash_algo = {algorithm!r}: leases prove prompts by block hashes and need one of "
            f"{', '.join(sorted(_PROVING_HASHES))}"
        )
    root = get_hash_fn_by_name(algorithm)(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))
    facts = {
        "hash": algorithm,
        "root": bytes(root).hex(),
        "block_size": cache.block_size,
        "model": model.model,
        "revision": model.revision,
        "config": hashlib.sha256(model.hf_config.to_json_string(use_diff=False).encode()).hexdigest(),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "layers": model.get_total_num_hidden_layers(),
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "groups": [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups],
        "vllm": ".".join(engine_version().split(".")[:2]),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def unsupported_layout(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why blocks of this engine cannot be leased, or None when they can.

    A block-hash chain proves a prefix, and a prefix is a list of blocks only where every layer keeps every token.
    Sliding windows, recurrent states and context-parallel interleaving keep something else.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism interleaves the tokens of a block over ranks"
    if len(kv_cache_config.kv_cache_groups) != 1:
        return f"{len(kv_cache_config.kv_cache_groups)} KV cache groups: some layers do not keep every token"
    kind = type(kv_cache_config.kv_cache_groups[0].kv_cache_spec).__name__
    if kind not in {"FullAttentionSpec", "MLAAttentionSpec"}:
        return f"KV cache of kind {kind}: its layers do not keep every token"
    return None


def source_sizes(scheduler: Any, vllm_config: Any) -> Mapping[str, int]:
    """How many ranks hold a block, and how often they registered it, as the base connector tells its readers."""
    parallel = vllm_config.parallel_config
    return {
        "tp_size": getattr(scheduler, "transfer_tp_size", parallel.tensor_parallel_size),  # from 0.30
        "dcp_size": parallel.decode_context_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "generation": getattr(scheduler, "_registration_generation", 0),  # from 0.33, changes after a sleep
    }


def scheduler_wakeup() -> Callable[[], None] | None:
    """A function that makes an idle engine look for work once; None when the engine has no loop of its own.

    An engine without requests blocks on its input queue and would give back the blocks of ended leases only with the
    next request. vLLM wakes that queue with a WAKEUP message itself, on shutdown, but hands connectors no way to do so.
    The connector is built inside the engine's constructor, so the engine is among the callers.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None:
        engine = frame.f_locals.get("self")
        inputs = getattr(engine, "input_queue", None)
        if type(engine).__name__.startswith(("EngineCoreProc", "DPEngineCoreProc")) and isinstance(inputs, queue.Queue):
            from vllm.v1.engine import EngineCoreRequestType  # noqa: PLC0415

            return lambda: inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))
        frame = frame.f_back
    return None


def share_logging() -> None:
    """Let this project's log lines take the way of vLLM's, which configures no logger but its own."""
    engine = logging.getLogger("vllm")
    for name in ("kvduplex_connector", "kvduplex_transfer"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = list(engine.handlers), not engine.handlers
        logger.setLevel(engine.level)
