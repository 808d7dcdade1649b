"""What routing shows of itself in metrics; every label has a closed set of values or one per engine or class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvduplex_router.events.trust import Trust

if TYPE_CHECKING:
    from kvduplex_router.routing.service import RoutingService

__all__ = ["Family", "families"]

Family = tuple[str, str, str, tuple[str, ...], Iterable[tuple[tuple[str, ...], float]]]


def families(service: RoutingService) -> Iterator[Family]:
    """Metric families, see `kvduplex_router.telemetry.families`."""
    yield from _decisions(service)
    yield from _knowledge(service)
    yield from _engines(service)


def _decisions(service: RoutingService) -> Iterator[Family]:
    tokeniser = service.tokeniser
    yield (
        "counter", "picks", "Engines picked, by class, policy and what decided.", ("class", "policy", "reason"),
        list(service.picks.items()),
    )  # fmt: skip
    yield (
        "counter", "prompts", "Prompts by where their tokens come from.", ("source",),
        [((source.value,), count) for source, count in tokeniser.counts.items()],
    )  # fmt: skip
    yield (
        "counter", "prompts_estimated", "Prompts that were estimated although there is a tokenizer, by reason.",
        ("reason",), [((reason,), count) for reason, count in tokeniser.failures.items()],
    )  # fmt: skip
    predicted = "Prompt tokens expected to be held where requests were sent, of requests whose engine reported."
    yield "counter", "predicted_tokens", predicted, (), [((), service.predicted)]
    off = "Tokens by which that expectation missed what engines reported, either way."
    yield "counter", "predicted_tokens_off", off, (), [((), service.off)]
    counted = "Requests whose prompt the engine counted otherwise than the router's tokenizer."
    yield "counter", "prompts_miscounted", counted, (), [((), service.miscounted)]


def _knowledge(service: RoutingService) -> Iterator[Family]:
    index, counts, cached = service.index, service.events.counts, service.tokeniser.cached
    yield "gauge", "index_bytes", "Bytes allocated for the block index.", (), [((), index.nbytes)]
    yield "gauge", "learned_units", "Units of 64 tokens remembered of what was sent.", (), [((), len(service.learned))]
    yield "gauge", "token_cache_bytes", "Bytes of tokens kept of earlier prompts.", (), [((), cached.held_bytes)]
    blocks = {name: getattr(index.counts, name) for name in type(index.counts).__slots__}
    yield (
        "counter", "event_blocks", "Blocks in KV events, by what became of them.", ("what",),
        [((name,), value) for name, value in blocks.items()],
    )  # fmt: skip
    messages = {name: getattr(counts, name) for name in type(counts).__slots__}
    yield (
        "counter", "event_messages", "Messages with KV events, and what was wrong with them.", ("what",),
        [((name,), value) for name, value in messages.items()],
    )  # fmt: skip


def _engines(service: RoutingService) -> Iterator[Family]:
    sizes = service.index.sizes()
    following = service.events.following
    known = [(name, desk) for name in service.engine_names() if (desk := service.desks.find(name)) is not None]
    yield (
        "gauge", "index_blocks", "Blocks that an engine holds by its events.", ("engine",),
        [((name,), sizes.get(name, 0)) for name in following],
    )  # fmt: skip
    yield (
        "gauge", "events_trusted", "1 while the events that an engine publishes are believed.", ("engine",),
        [((name,), float(desk.trust.state is Trust.TRUSTED)) for name, desk in known if name in following],
    )  # fmt: skip
    yield (
        "gauge", "pending_tokens", "Prompt tokens sent to an engine and not yet computed.", ("engine",),
        [((name,), desk.pending_tokens) for name, desk in known],
    )  # fmt: skip
    yield (
        "gauge", "prefill_token_seconds", "Seconds an engine takes for a prompt token, as learned.", ("engine",),
        [((name,), desk.cost.per_token) for name, desk in known if desk.cost.samples],
    )  # fmt: skip
