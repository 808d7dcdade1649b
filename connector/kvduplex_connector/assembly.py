"""Puts the parts of one engine's scheduler side together from its configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvduplex_connector import compat
from kvduplex_connector.holder import Holder
from kvduplex_connector.pool import BlockPool, PinnedPool
from kvduplex_connector.reader import Reader
from kvduplex_connector.recorder import LeaseRecorder
from kvduplex_connector.settings import LeaseSettings
from kvduplex_transfer.leases.claims import Claimant
from kvduplex_transfer.leases.messages import Identity, Source
from kvduplex_transfer.leases.records import LeaseLimits
from kvduplex_transfer.leases.server import LeaseServer
from kvduplex_transfer.leases.table import LeaseTable

__all__ = ["DecodeSide", "EngineFacts", "build_decode_side", "build_reader"]

_log = logging.getLogger(__name__)

_LEAST_WATERMARK: Final = 1


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What both sides need to know of their engine."""

    engine_id: str
    model: str
    version: str
    block_size: int
    fingerprint: bytes
    rank: int

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
        """Read them from vLLM's configuration.

        Raises:
            LeaseConfigError: The engine's block hashes prove nothing.
        """
        return cls(
            engine_id=vllm_config.kv_transfer_config.engine_id,
            model=vllm_config.model_config.model,
            version=compat.engine_version(),
            block_size=vllm_config.cache_config.block_size,
            fingerprint=compat.fingerprint(vllm_config, kv_cache_config),
            rank=vllm_config.parallel_config.data_parallel_index,
        )


@dataclass(frozen=True, slots=True)
class DecodeSide:
    """A decode engine's leases and the endpoint that answers for them."""

    holder: Holder
    server: LeaseServer

    def record(self, recorder: LeaseRecorder) -> None:
        """Bring `recorder` up to date."""
        counts, now = self.holder.table.counts(), self.holder.table.snapshot()
        for name, value in (("began", counts.held), ("trimmed", counts.trimmed), ("denied", counts.denied)):
            recorder.total(name, value=value)
        recorder.total("renewed", value=counts.renewed)
        declined = counts.refused + self.server.refused()
        totals = {"ended": counts.ends, "claims_ended": counts.claim_ends, "declined": declined}
        for name, by_label in {**totals, "dropped": self.server.dropped()}.items():
            for label, value in by_label.items():
                recorder.total(name, label, value=value)
        recorder.gauge("held", now.held)
        recorder.gauge("claimed", now.claimed)
        recorder.gauge("blocks_pinned", now.blocks_pinned)
        recorder.gauge("budget_use", now.blocks_pinned / now.budget_blocks if now.budget_blocks else 0.0)


def build_decode_side(
    *,
    settings: LeaseSettings,
    facts: EngineFacts,
    pool: BlockPool,
    source: Callable[[], Source | None],
    wake: Callable[[], None],
) -> DecodeSide:
    """Make a decode engine's side and bind its endpoint.

    Raises:
        LeaseConfigError: The endpoint cannot be bound, or a key file is wrong.
    """
    pinned = PinnedPool(pool)
    limits = LeaseLimits(
        budget_blocks=int(pinned.total * settings.retention_budget),
        lease_ttl_s=settings.lease_ttl_s,
        max_ttl_s=settings.decoder_kv_blocks_ttl,
        claim_ttl_s=settings.claim_ttl_s,
        max_claims=settings.lease_max_claims,
    )
    table = LeaseTable(limits=limits, clock=time.monotonic)
    watermark = max(int(pinned.total * settings.reclaim_watermark), _LEAST_WATERMARK)
    holder = Holder(table=table, pool=pinned, block_size=facts.block_size, watermark=watermark)

    def identity(nonce: int) -> Identity:
        now = table.snapshot()
        return Identity(
            nonce,
            facts.engine_id,
            facts.model,
            facts.version,
            facts.block_size,
            facts.fingerprint,
            now.held + now.claimed,
            now.blocks_pinned,
            now.budget_blocks,
            limits.lease_ttl_s,
            limits.max_ttl_s,
        )

    server = LeaseServer(
        table=table,
        identity=identity,
        source=source,
        host=settings.lease_host,
        port=settings.lease_port + facts.rank,
        on_loose=wake,
        curve=settings.curve_server(),
    )
    server.start()
    _log.info(
        "Leases: endpoint %s, budget %d of %d blocks, %g s from a renewal, %g s at most",
        server.endpoint,
        limits.budget_blocks,
        pinned.total,
        limits.lease_ttl_s,
        limits.max_ttl_s,
    )
    return DecodeSide(holder, server)


def build_reader(
    *, settings: LeaseSettings, facts: EngineFacts, pool: BlockPool, recorder: LeaseRecorder
) -> tuple[Reader, Claimant]:
    """Make a prefill engine's side.

    Raises:
        LeaseConfigError: A key file is missing.
    """
    claimant = Claimant(
        fingerprint=facts.fingerprint,
        timeout_s=settings.claim_timeout_s,
        clock=time.monotonic,
        curve=settings.curve_client(),
    )
    reader = Reader(
        claimant=claimant,
        recorder=recorder,
        block_size=facts.block_size,
        threshold=settings.kv_recompute_threshold,
        peers=settings.lease_peers,
        cached_prefix=PinnedPool(pool).cached_prefix,
        clock=time.monotonic,
    )
    return reader, claimant
