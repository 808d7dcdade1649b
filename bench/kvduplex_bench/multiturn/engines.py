"""What the engines themselves counted while a segment was measured: where prefill's time went, and what moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvduplex_bench.errors import BenchError
from kvduplex_bench.scrape import Reading, scrape

__all__ = ["Counted", "Engines", "Split"]

_COUNTED_WITHIN_S: Final = 15.0
_POLL_S: Final = 0.05
_FINISHED: Final = "vllm:request_prefill_time_seconds_count"
_SOURCE: Final = "vllm:prompt_tokens_by_source_total"
_CACHE: Final = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Split:
    """A prefill request's time inside its engine, mean over a segment, in seconds.

    Attributes:
        recompute_s: Computing prompt tokens, from the step that took the request up to its token.
        transfer_s: NIXL reads from the decode engine.
        claim_s: Waiting for the answer to a claim.
        queue_s: The rest of the time before it was taken up: other requests, and the step that was under way.
    """

    recompute_s: float
    transfer_s: float
    claim_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class Counted:
    """Sums over a segment's measured turns.

    Attributes:
        requests: Requests that the prefill engines finished.
        prefill_s: Their time from being taken up to the token.
        queue_s: Their time before that, transfers and claims included.
        transfer_s: Reads from decode engines.
        claim_s: Claims.
        computed_tokens: Prompt tokens that were computed.
        local_tokens: Prompt tokens from the prefill engines' own cache.
        pulled_tokens: Prompt tokens that came from decode engines.
        pulled_bytes: Bytes of those.
        pulled_pieces: Descriptors of those reads.
        pulls: Reads.
        handed_bytes: Bytes that the decode engines read from prefill engines.
        refused: Claims that ended in recomputation.
    """

    requests: int = 0
    prefill_s: float = 0.0
    queue_s: float = 0.0
    transfer_s: float = 0.0
    claim_s: float = 0.0
    computed_tokens: int = 0
    local_tokens: int = 0
    pulled_tokens: int = 0
    pulled_bytes: int = 0
    pulled_pieces: int = 0
    pulls: int = 0
    handed_bytes: int = 0
    refused: int = 0

    def __add__(self, other: Counted) -> Counted:
        """Both together."""
        mine, theirs = asdict(self), asdict(other)
        return Counted(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def split(self) -> Split | None:
        """The mean request's time in parts; None when nothing was counted."""
        if not self.requests:
            return None
        waited = max(0.0, self.queue_s - self.transfer_s - self.claim_s)
        parts = (self.prefill_s, self.transfer_s, self.claim_s, waited)
        return Split(*(part / self.requests for part in parts))

    def as_json(self) -> dict[str, Any]:
        """All sums."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a cluster whose metrics are read; none at all when the user named none."""

    prefill: Sequence[str]
    decode: Sequence[str]

    @property
    def known(self) -> bool:
        """Whether prefill's time can be split."""
        return bool(self.prefill)

    async def prefill_cache(self) -> bool | None:
        """Whether the prefill engines keep a prefix cache; None when they do not say.

        Raises:
            UnreachableError: One does not answer.
            BenchError: They differ.
        """
        said = {
            dict(labels).get("enable_prefix_caching")
            for reading in await _scrape_all(self.prefill)
            for (name, labels) in reading.samples
            if name == _CACHE
        }
        if len(said) > 1:
            raise BenchError(
                f"--prefill {' '.join(self.prefill)}: some keep a prefix cache and some do not; one kind only"
            )
        return {"True": True, "False": False}.get(str(said.pop())) if said else None

    async def must_have_connector(self) -> None:
        """Refuse prefill engines that cannot read from decode engines.

        Raises:
            UnreachableError: One does not answer.
            BenchError: One runs without a NIXL connector.
        """
        for url, reading in zip(self.prefill, await _scrape_all(self.prefill), strict=True):
            if not any(name.startswith("vllm:nixl_") for name, _ in reading.samples):
                raise BenchError(
                    f"{url} runs without a NIXL connector (its /metrics has no vllm:nixl_...): KV cannot flow back to "
                    "it. Start it with --kv-transfer-config, or with kvduplex serve; or measure --arms off alone"
                )

    async def read(self) -> tuple[list[Reading], list[Reading]]:
        """All metrics now, of prefill and of decode engines."""
        return await _scrape_all(self.prefill), await _scrape_all(self.decode)

    async def since(self, before: tuple[list[Reading], list[Reading]], requests: int) -> Counted:
        """What was counted since `before`; an engine answers before it counts, so `requests` are waited for.

        Raises:
            UnreachableError: An engine does not answer.
            BenchError: The engines count fewer or more requests than were sent.
        """
        deadline = time.monotonic() + _COUNTED_WITHIN_S
        while True:
            prefill, decode = await self.read()
            ours = [now.since(then) for now, then in zip(prefill, before[0], strict=True)]
            theirs = [now.since(then) for now, then in zip(decode, before[1], strict=True)]
            finished = int(_sum(ours, _FINISHED))
            if finished == requests:
                return _counted(ours, theirs)
            if finished > requests:
                raise BenchError(
                    f"the prefill engines finished {finished} requests while {requests} were sent; stop other traffic, "
                    "or leave --prefill out to measure without them"
                )
            if time.monotonic() > deadline:
                raise BenchError(
                    f"the prefill engines counted {finished} of {requests} requests; does the router use the engines "
                    "given with --prefill?"
                )
            await asyncio.sleep(_POLL_S)


def _counted(prefill: list[Reading], decode: list[Reading]) -> Counted:
    return Counted(
        requests=int(_sum(prefill, _FINISHED)),
        prefill_s=_sum(prefill, "vllm:request_prefill_time_seconds_sum"),
        queue_s=_sum(prefill, "vllm:request_queue_time_seconds_sum"),
        transfer_s=_sum(prefill, "vllm:nixl_xfer_time_seconds_sum"),
        claim_s=_sum(prefill, "kvduplex_lease_claim_seconds_sum"),
        computed_tokens=int(_sum(prefill, _SOURCE, source="local_compute")),
        local_tokens=int(_sum(prefill, _SOURCE, source="local_cache_hit")),
        pulled_tokens=int(_sum(prefill, _SOURCE, source="external_kv_transfer")),
        pulled_bytes=int(_sum(prefill, "vllm:nixl_bytes_transferred_sum")),
        pulled_pieces=int(_sum(prefill, "vllm:nixl_num_descriptors_sum")),
        pulls=int(_sum(prefill, "vllm:nixl_bytes_transferred_count")),
        handed_bytes=int(_sum(decode, "vllm:nixl_bytes_transferred_sum")),
        refused=int(_sum(prefill, "kvduplex_lease_refused_total")),
    )


def _sum(readings: Sequence[Reading], name: str, **labels: str) -> float:
    return sum(reading.total(name, **labels) for reading in readings)


async def _scrape_all(urls: Sequence[str]) -> list[Reading]:
    return [await asyncio.to_thread(scrape, url) for url in urls]
