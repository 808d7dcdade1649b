"""Leases in the worker processes: a read that outlived its claim counts as failed.

The decode engine gives claimed blocks away when a claim lapses, and a one-sided read cannot notice. Only the reader can
tell that it took too long, so what arrived too late is reported as a failed load, and the scheduler recomputes it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kvduplex_connector.deadlines import ReadDeadlines
from kvduplex_connector.stats import LeaseKVConnectorStats

__all__ = ["WorkerLeases"]

_log = logging.getLogger(__name__)


class WorkerLeases:
    """Worker-side methods of the connector. `_set_up_worker` must run before any of them."""

    _connector_metadata: Any
    _deadlines: ReadDeadlines
    _late_blocks: set[int]

    def _set_up_worker(self) -> None:
        self._deadlines = ReadDeadlines(time.monotonic)
        self._late_blocks = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's reads."""
        meta = self._connector_metadata
        for request_id, budget_s in getattr(meta, "kvduplex_read_budgets", {}).items():
            if (order := meta.reqs_to_recv.get(request_id)) is not None:
                blocks = frozenset(block for group in order.local_block_ids for block in group)
                self._deadlines.begin(request_id, budget_s, blocks)
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Reads that ended, for vLLM 0.32 and later, which takes failures by request."""
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        if late := self._late(results.finished_recving - results.failed_recving):
            results.failed_recving |= late
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Reads that ended, for earlier versions, which take failures by block."""
        sent, received = super().get_finished(finished_req_ids)  # type: ignore[misc]
        self._late(set(received))
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose content must not be used."""
        blocks: set[int] = super().get_block_ids_with_load_errors()  # type: ignore[misc]
        late, self._late_blocks = self._late_blocks, set()
        return blocks | late

    def _late(self, received: set[str]) -> set[str]:
        late = self._deadlines.end(received)
        for request_id, blocks in late.items():
            _log.warning("The read of request %s outlived its claim; recomputing %d blocks", request_id, len(blocks))
            self._late_blocks |= blocks
        return set(late)

    def _with_leases(self, stats: Any) -> LeaseKVConnectorStats | None:
        """The base's statistics in the class that can take those of leases."""
        return None if stats is None else LeaseKVConnectorStats(stats.data)
