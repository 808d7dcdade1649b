"""Whether engines are listed by the data-parallel ranks that their servers have."""

from __future__ import annotations

import logging
from collections.abc import Collection

from kvduplex_router.fleet.engine import Engine

__all__ = ["NO_RANK", "RankKeeper"]

_log = logging.getLogger("kvduplex.router.fleet")
NO_RANK = "no_rank"
"""Kind of reason in `Engine.shut_because`."""


class RankKeeper:
    """Keeps requests from ranks that a server does not have, and says when a server has ranks that are not listed."""

    def __init__(self) -> None:
        self._told: set[Engine] = set()

    def judge(self, engine: Engine, ranks: Collection[int]) -> None:
        """Compare an engine's entry with the ranks that its server's metrics name; none named contradicts nothing."""
        index = engine.address.dp_index
        if index is None:
            self._unlisted(engine, ranks)
            return
        reason = None
        if ranks and index not in ranks:
            reason = f"its server has no data-parallel rank {index}, only {_shown(ranks)}"
        if reason is not None and NO_RANK not in engine.shut_because:
            _log.error(
                "%s engine %s is left out: %s; a server asked for a rank that it has not refuses the request. Correct "
                "dp_size, dp_rank or dp_start",
                engine.role.value,
                engine.name,
                reason,
            )
        engine.shut(NO_RANK, reason)

    def forget(self, engine: Engine) -> None:
        """An engine is gone."""
        self._told.discard(engine)

    def _unlisted(self, engine: Engine, ranks: Collection[int]) -> None:
        if len(ranks) < 2 or engine in self._told:  # noqa: PLR2004 - one rank is one engine
            return
        self._told.add(engine)
        first = min(ranks)
        start = f"&dp_start={first}" if first else ""
        _log.warning(
            "%s engine %s runs %d data-parallel ranks, each with a cache of its own, and is listed as one engine: what "
            "is known of its cache holds for one of them. List it as %s#dp_size=%d%s",
            engine.role.value,
            engine.name,
            len(ranks),
            engine.address.origin.url,
            len(ranks),
            start,
        )


def _shown(ranks: Collection[int]) -> str:
    first, last = min(ranks), max(ranks)
    return str(first) if first == last else f"{first} to {last}"
