"""What ``kv_transfer_params`` mean to a simulated engine: leases, claims, and blocks kept for a reader.

The lease messages are the real ones, over the real sockets; only the KV behind them is made up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

from kvduplex_bench.sim.core.engine import EngineCore
from kvduplex_bench.sim.core.sequence import Load, LoadEnd, Work
from kvduplex_bench.sim.errors import SimError
from kvduplex_bench.sim.settings import Connector, EngineSettings, Role
from kvduplex_bench.sim.side import SideChannel
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.claims import Claimant, PendingClaim
from kvduplex_transfer.leases.errors import InvalidLeaseError, LeaseConfigError
from kvduplex_transfer.leases.messages import Identity, Source
from kvduplex_transfer.leases.params import RETENTION_KEY, ClaimOffer, Retention
from kvduplex_transfer.leases.server import LeaseServer

__all__ = ["SEND_TTL_S", "Transfers"]

SEND_TTL_S: Final = 480.0
"""Seconds a prefill engine keeps an answer's blocks for a reader that does not come, as vLLM's default."""

_CLAIM_TIMEOUT_S: Final = 0.25
_POLL_S: Final = 0.001
_OFFERS_KEPT: Final = 65_536


class Transfers:
    """One engine's dealings with others.

    Args:
        settings: The engine.
        core: Its core.
        engine_id: Fresh for each start.
    """

    def __init__(self, settings: EngineSettings, core: EngineCore, engine_id: str) -> None:
        self._settings = settings
        self._core = core
        self.engine_id = engine_id
        timing = settings.timing
        self._fingerprint = sha256(f"simulated {timing.model} {timing.block_size}".encode()).digest()[:32]
        self.side = SideChannel(readable=self._readable, done=core.read_done)
        leased = settings.connector is Connector.LEASED
        self._server = self._lease_server() if leased and settings.role is Role.DECODE else None
        self._claimant = (
            Claimant(fingerprint=self._fingerprint, timeout_s=_CLAIM_TIMEOUT_S, clock=time.monotonic)
            if leased and settings.role is Role.PREFILL
            else None
        )
        self.refused: dict[str, int] = {}
        """Claims that ended in recomputation, by reason."""
        self._offered = 0
        self._offers: deque[str] = deque(maxlen=_OFFERS_KEPT)

    async def start(self) -> None:
        """Open the sockets.

        Raises:
            SimError: An address cannot be bound.
        """
        address = self._settings.address
        try:
            await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: self.side, local_addr=(address.host, address.port)
            )
            if self._server is not None:
                self._server.start()
        except (OSError, LeaseConfigError) as error:
            raise SimError(f"engine at {address.host}:{address.port}: {error}") from error

    def close(self) -> None:
        """Close them."""
        self.side.close()
        if self._server is not None:
            self._server.close()
        if self._claimant is not None:
            self._claimant.close()

    @property
    def offers(self) -> dict[str, Any]:
        """How many leases requests named for this engine to claim, and the last ones, each as often as it was named."""
        return {"offered": self._offered, "leases": list(self._offers)}

    async def prepare(self, work: Work, params: Mapping[str, Any]) -> tuple[Retention | None, float | None]:
        """Find out what `work` can have from elsewhere, and what is to be kept of it.

        Returns:
            What is kept under a lease, and for how long its blocks wait for a reader.
        """
        if params.get("do_remote_decode"):
            await self._prepare_prefill(work, params)
            return None, SEND_TTL_S
        if params.get("do_remote_prefill"):
            work.load = await self._read(params, self._settings.timing.forward.seconds)
        if self._settings.connector is Connector.STOCK and self._settings.role is Role.DECODE:
            return None, self._settings.blocks_ttl_s
        return (self._retention(params) if self._server is not None else None), None

    def answer(self, work: Work, params: Mapping[str, Any], kept: Retention | None) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` of the answer."""
        if kept is not None:
            return {RETENTION_KEY: {"id": kept.id, "tokens": self._tokens_kept(work)}}
        prefilled = bool(params.get("do_remote_decode"))
        if not prefilled and self._settings.connector is not Connector.STOCK:
            return None
        address, tokens = self._settings.address, work.prompt_tokens + work.output_tokens - 1
        return {
            "do_remote_prefill": prefilled,
            "do_remote_decode": not prefilled,
            "remote_block_ids": [work.blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": work.id,
            "remote_host": address.host,
            "remote_port": address.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None if prefilled else time.perf_counter() + self._settings.blocks_ttl_s,
            "transfer_mode": "pull",
        }

    async def _prepare_prefill(self, work: Work, params: Mapping[str, Any]) -> None:
        back = self._settings.timing.back.seconds
        try:
            offer = ClaimOffer.parse(params)
        except InvalidLeaseError:
            self._refuse("malformed")
            return
        if offer is not None:
            self._offered += 1
            self._offers.append(offer.id)
        if offer is not None and self._claimant is not None:
            work.load = await self._claim(self._claimant, offer, work)
        elif params.get("remote_block_ids") and self._settings.connector is Connector.STOCK:
            work.load = await self._read(params, back)
        if work.load is not None:
            work.load.least_tokens = self._settings.threshold
            reuse = self._settings.timing.reuse
            work.load.reuse_s = lambda tokens: reuse.step_s + reuse.per_token_s * tokens

    async def _claim(self, claimant: Claimant, offer: ClaimOffer, work: Work) -> Load | None:
        size = self._settings.timing.block_size
        chain = HashChain.of(work.hashes[: work.prompt_tokens // size])
        if len(chain) * size < self._settings.threshold:
            self._refuse("short")
            return None
        claim = claimant.claim(offer.endpoint, offer.id, chain)
        try:
            while claim.waiting:
                await asyncio.sleep(_POLL_S)
                claimant.poll()
        except asyncio.CancelledError:
            claimant.abandon(claim)
            raise
        if claim.grant is None:
            self._refuse(claim.refusal or "unknown")
            return None
        return Load(
            len(claim.grant.blocks) * size,
            self._settings.timing.back.seconds,
            ended=lambda end: self._claim_ended(claimant, claim, end),
        )

    def _claim_ended(self, claimant: Claimant, claim: PendingClaim, end: LoadEnd) -> None:
        if end is LoadEnd.READ:
            claimant.finish(claim, consumed=True)
        else:
            claimant.abandon(claim)
            self._refuse("unused")

    async def _read(self, params: Mapping[str, Any], seconds: Any) -> Load | None:
        host, port = str(params.get("remote_host")), params.get("remote_port")
        engine, request = str(params.get("remote_engine_id")), str(params.get("remote_request_id"))
        if not isinstance(port, int):
            return None
        tokens = await self.side.ask(host, port, engine, request)
        if tokens is None:
            return None
        return Load(tokens, seconds, ended=lambda _end: self.side.tell_done(host, port, engine, request))

    def _readable(self, engine: str, request: str) -> int | None:
        if engine != self.engine_id:
            return None
        return self._core.readable(request, asyncio.get_running_loop().time() / self._settings.time_scale)

    def _retention(self, params: Mapping[str, Any]) -> Retention | None:
        try:
            found = Retention.parse(params)
        except InvalidLeaseError:
            return None
        return found if found is not None and found.id is not None else None

    def _tokens_kept(self, work: Work) -> int:
        size = self._settings.timing.block_size
        return min((work.prompt_tokens + work.output_tokens - 1) // size, len(work.hashes)) * size

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _lease_server(self) -> LeaseServer:
        settings, timing = self._settings, self._settings.timing
        source = Source(self.engine_id, settings.address.host, settings.address.port)

        def identity(nonce: int) -> Identity:
            table = self._core.table.snapshot()
            limits = self._core.table.limits
            return Identity(
                nonce, self.engine_id, timing.model, "simulated", timing.block_size, self._fingerprint,
                table.held, table.blocks_pinned, table.budget_blocks, limits.lease_ttl_s, limits.max_ttl_s,
            )  # fmt: skip

        return LeaseServer(
            table=self._core.table,
            identity=identity,
            source=lambda: source,
            host=settings.address.host,
            port=settings.address.lease,
        )
