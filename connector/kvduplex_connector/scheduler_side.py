"""Leases in the scheduler process: a mixin over any NIXL pull connector of vLLM.

The base connector keeps doing one-way transfers, handshakes and reads. This mixin decides who may read what: a decode
engine's blocks are held by leases instead of the base's fixed timer, and a prefill engine reads them only under a
granted claim. Without leases in a request's parameters everything is the base connector's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvduplex_connector import compat
from kvduplex_connector.assembly import DecodeSide, EngineFacts, build_decode_side, build_reader
from kvduplex_connector.reader import Read, Reader
from kvduplex_connector.recorder import LeaseRecorder
from kvduplex_connector.settings import LeaseSettings
from kvduplex_connector.stats import LeaseKVConnectorStats
from kvduplex_transfer.leases.claims import Claimant
from kvduplex_transfer.leases.errors import InvalidLeaseError
from kvduplex_transfer.leases.messages import Source
from kvduplex_transfer.leases.params import ClaimOffer, Retention

__all__ = ["SchedulerLeases"]

_log = logging.getLogger(__name__)


class SchedulerLeases:
    """Scheduler-side methods of the connector. `_set_up_scheduler` must run before any of them."""

    _vllm_config: Any
    _kv_cache_config: Any
    connector_scheduler: Any

    _settings: LeaseSettings
    _recorder: LeaseRecorder
    _decode: DecodeSide | None
    _reader: Reader | None
    _claimant: Claimant | None
    _wake: Callable[[], None] | None
    _readable: bool
    _budgets: dict[str, float]
    _said: set[str]

    def _set_up_scheduler(self, settings: LeaseSettings) -> None:
        self._settings = settings
        self._recorder = LeaseRecorder()
        self._decode = self._reader = self._claimant = None
        self._wake = compat.scheduler_wakeup()
        self._readable = False
        self._budgets = {}
        self._said = set()
        # The base would pin a finished request's blocks for a fixed time and read whatever a handle names.
        self.connector_scheduler.is_bidirectional_kv_xfer_enabled = False
        transfer = self._vllm_config.kv_transfer_config
        if transfer.is_kv_producer and transfer.kv_load_failure_policy != "recompute":
            _log.info("Leases: kv_load_failure_policy is recompute for a prefill engine, whatever was set")
            transfer.kv_load_failure_policy = "recompute"

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the engine's blocks; from here on leases can be held and claimed."""
        super().bind_gpu_block_pool(gpu_block_pool)  # type: ignore[misc]
        facts = EngineFacts.of(self._vllm_config, self._kv_cache_config)
        if reason := compat.unsupported_layout(self._vllm_config, self._kv_cache_config):
            _log.warning("Leases are off, one-way transfer works: %s", reason)
            return
        transfer = self._vllm_config.kv_transfer_config
        if transfer.is_kv_consumer:
            self._decode = build_decode_side(
                settings=self._settings,
                facts=facts,
                pool=gpu_block_pool,
                source=self._where_to_read,
                wake=self._wake or (lambda: None),
            )
        if transfer.is_kv_producer:
            if self.connector_scheduler.use_host_buffer:
                _log.warning("Claims are off, one-way transfer works: the base cannot read into a host buffer")
                return
            self._reader, self._claimant = build_reader(
                settings=self._settings, facts=facts, pool=gpu_block_pool, recorder=self._recorder
            )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """The workers' memory can be read now; when that happens again it was registered anew, and leases are void."""
        super().set_xfer_handshake_metadata_pp_aware(metadata)  # type: ignore[misc]
        if self._readable and self._decode is not None:
            self._decode.holder.drop()
        self._readable = True

    def on_new_request(self, request: Any) -> None:
        """Send the claim at once, so that its answer is there when the request is scheduled."""
        super().on_new_request(request)  # type: ignore[misc]
        params = request.kv_transfer_params
        if self._reader is None or not params or not params.get("do_remote_decode"):
            return
        try:
            offer = ClaimOffer.parse(params)
        except InvalidLeaseError as error:
            self._reader.malformed(error)
            return
        if offer is not None and not request.skip_reading_prefix_cache:
            self._reader.arrived(request, offer)
        elif params.get("remote_block_ids"):
            self._say("A decode engine without leases handed its blocks over; they are not read without a claim")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load from elsewhere; None while a claim is in flight."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            tokens = self._reader.matched_tokens(request, num_computed_tokens) if self._reader else 0
            return tokens, bool(tokens)
        if self._decode is not None:
            self._decode.holder.make_room(request, num_computed_tokens)
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated: start the read that was granted, if any."""
        params = request.kv_transfer_params or {}
        if self._reader is not None and params.get("do_remote_decode"):
            local = blocks.get_unhashed_block_ids_all_groups()[0] if num_external_tokens else ()
            read = self._reader.allocated(request, num_external_tokens, local)
            if read is not None:
                self._direct(request, read)
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended: give its claim back, or keep its blocks under the lease it names."""
        delayed, params = super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]
        return delayed, self._finished(request, block_ids) or params

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for an engine without the hybrid memory allocator."""
        delayed, params = super().request_finished(request, block_ids)  # type: ignore[misc]
        return delayed, self._finished(request, (block_ids,)) or params

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Once a step: the base's orders to the workers, and how long each claimed read may take."""
        if self._reader is not None:
            self._reader.poll()
        if self._decode is not None:
            self._decode.holder.tick()
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        meta.kvduplex_read_budgets, self._budgets = self._budgets, {}
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """Reads ended: tell the decode engines."""
        super().update_connector_output(connector_output)  # type: ignore[misc]
        if self._reader is not None and connector_output.finished_recving:
            failed = getattr(connector_output, "failed_recving", None) or ()  # from 0.32
            self._reader.received(connector_output.finished_recving, failed, connector_output.invalid_block_ids or ())

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step although it has no request: blocks wait to be given back."""
        waiting = self._decode is not None and self._decode.holder.table.any_loose
        return waiting or super().has_pending_push_work()  # type: ignore[misc]

    def has_pending_block_frees(self) -> bool:
        """Asked by vLLM 0.32 and later before it preempts a running request: leases go first."""
        relieved = self._decode is not None and self._decode.holder.relieve()
        return relieved or super().has_pending_block_frees()  # type: ignore[misc]

    def reset_cache(self) -> bool | None:
        """Drop every lease: cached KV is no longer true."""
        if self._decode is not None:
            self._decode.holder.drop()
        return True

    def _scheduler_stats(self) -> LeaseKVConnectorStats | None:
        if self._decode is not None:
            self._decode.record(self._recorder)
        values = self._recorder.drain()
        return LeaseKVConnectorStats(values) if values else None

    def _shut_down_scheduler(self) -> None:
        if self._decode is not None:
            self._decode.server.close()
        if self._claimant is not None:
            self._claimant.close()

    def _finished(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        params = request.kv_transfer_params or {}
        if self._reader is not None:
            self._reader.finished(request.request_id)
        if self._decode is None or params.get("do_remote_decode"):
            return None
        try:
            retention = Retention.parse(params)
        except InvalidLeaseError as error:
            self._say(f"Not keeping a request's blocks: {error}")
            return None
        if retention is None:
            if "remote_engine_id" in params:
                self._say("A request from a prefill engine names no lease: its blocks are not kept for the next turn")
            return None
        return self._decode.holder.finished(request, block_ids[0], retention)

    def _direct(self, request: Any, read: Read) -> None:
        """Give the base what it needs to read; it takes it up in `update_state_after_alloc`."""
        request.kv_transfer_params.update(
            do_remote_prefill=True,  # the base clears it again once the read is ordered
            remote_block_ids=(list(read.blocks),),
            remote_engine_id=read.source.engine_id,
            remote_request_id=compat.NOTICE_PREFIX + request.request_id.replace(",", "_"),
            remote_host=read.source.host,
            remote_port=read.source.port,
            tp_size=read.source.tp_size,
            dcp_size=read.source.dcp_size,
            pp_size=read.source.pp_size,
            remote_num_tokens=len(read.blocks) * self._vllm_config.cache_config.block_size,
            remote_registration_generation=read.source.generation,
        )
        self._budgets[request.request_id] = read.budget_s

    def _where_to_read(self) -> Source | None:
        if not self._readable:
            return None
        scheduler = self.connector_scheduler
        return Source(
            scheduler.engine_id,
            scheduler.side_channel_host,
            scheduler.side_channel_port,
            **compat.source_sizes(scheduler, self._vllm_config),
        )

    def _say(self, text: str) -> None:
        """Log once: it would be true of every request."""
        if text not in self._said and len(self._said) < 32:  # noqa: PLR2004 - bounds what odd peers can make us keep
            self._said.add(text)
            _log.warning("%s", text)
