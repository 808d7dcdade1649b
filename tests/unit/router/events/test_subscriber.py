"""Subscribers against a real publisher: late, with gaps, restarted, in garbage and in floods."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvduplex_router.events.index import BlockIndex
from kvduplex_router.events.service import EventService
from kvduplex_router.events.trust import Trust, TrustKeeper


class Watch:
    """An event service over one engine named "e"."""

    def __init__(self) -> None:
        self.index = BlockIndex(max_blocks=100_000)
        self.trust = TrustKeeper()
        self.wanted: dict[str, tuple[str, str | None, int | None]] = {}
        self.service = EventService(
            self.index, trust=lambda _name: self.trust, wanted=lambda: self.wanted, clock=time.monotonic
        )

    def follow(self, publisher: Any, *, rank: int | None = None) -> None:
        replay = publisher.replay_port
        self.wanted = {"e": (f"127.0.0.1:{publisher.port}", replay and f"127.0.0.1:{replay}", rank)}
        self.service.reconcile()


@pytest.fixture
async def watch() -> AsyncIterator[Watch]:
    made = Watch()
    yield made
    made.service.close()


Make = Callable[..., Any]


async def heard(watch: Watch, publisher: Any, make: Make, hashes: Make) -> None:
    """Publish until something arrives: nobody knows when a subscription is up."""
    watch.follow(publisher)
    if publisher.replay_port is not None:
        await publisher.until(lambda: publisher.replays and not watch.service.following["e"].feed.replaying, "replay")
        return
    for token in range(1_000, 3_000, 2):
        publisher.publish(make(token, token + 1))
        await asyncio.sleep(0.005)
        if watch.service.counts.batches:
            return
    raise AssertionError("nothing arrived")


async def test_events_enter_the_index(watch: Watch, publishers: Make, event: Make, hashes: Make) -> None:
    publisher = publishers()
    await heard(watch, publisher, event, hashes)
    publisher.publish(event(1, 2, 3, 4))
    await publisher.until(lambda: watch.index.overlaps(hashes(1, 2, 3, 4, 5, 6)) == {"e": 2}, "stored")
    assert watch.trust.state is Trust.TRUSTED
    publisher.publish({"type": "AllBlocksCleared"})
    await publisher.until(lambda: watch.index.overlaps(hashes(1, 2)) == {}, "cleared")


async def test_who_comes_late_is_told_what_was_before(
    watch: Watch, publishers: Make, event: Make, hashes: Make
) -> None:
    publisher = publishers()
    publisher.publish(event(1, 2))
    publisher.publish(event(3, 4))
    watch.follow(publisher)
    await publisher.until(lambda: watch.index.overlaps(hashes(3, 4)) == {"e": 1}, "replayed")
    assert watch.index.overlaps(hashes(1, 2)) == {"e": 1}
    assert watch.trust.state is Trust.TRUSTED


async def test_who_comes_too_late_is_not_trusted(watch: Watch, publishers: Make, event: Make, hashes: Make) -> None:
    publisher = publishers(kept=1)
    publisher.publish(event(1, 2))
    publisher.publish(event(3, 4))
    watch.follow(publisher)
    await publisher.until(lambda: watch.index.overlaps(hashes(3, 4)) == {"e": 1}, "replayed")
    assert watch.index.overlaps(hashes(1, 2)) == {}
    assert watch.trust.state is Trust.UNTRUSTED


async def test_a_gap_is_filled_by_a_replay(watch: Watch, publishers: Make, event: Make, hashes: Make) -> None:
    publisher = publishers()
    await heard(watch, publisher, event, hashes)
    publisher.publish(event(1, 2))
    publisher.publish(event(3, 4), lose=True)
    publisher.publish(event(5, 6))
    await publisher.until(lambda: watch.index.overlaps(hashes(5, 6)) == {"e": 1}, "after the gap")
    assert watch.index.overlaps(hashes(3, 4)) == {"e": 1}
    assert watch.trust.state is Trust.TRUSTED
    assert watch.service.counts.gaps == 1


async def test_a_gap_without_replays_costs_the_engine_its_trust_and_its_blocks(
    watch: Watch, publishers: Make, event: Make, hashes: Make
) -> None:
    publisher = publishers(replay=False)
    await heard(watch, publisher, event, hashes)
    publisher.publish(event(1, 2))
    publisher.publish(event(3, 4), lose=True)
    publisher.publish(event(5, 6))
    await publisher.until(lambda: watch.index.overlaps(hashes(5, 6)) == {"e": 1}, "after the gap")
    assert watch.index.overlaps(hashes(1, 2)) == {}
    assert watch.trust.state is Trust.UNTRUSTED
    publisher.publish({"type": "AllBlocksCleared"})
    await publisher.until(lambda: watch.trust.state.value == "trusted", "an empty cache is known completely")


async def test_an_engine_that_begins_anew_holds_nothing_of_before(
    watch: Watch, publishers: Make, event: Make, hashes: Make
) -> None:
    publisher = publishers()
    await heard(watch, publisher, event, hashes)
    publisher.publish(event(1, 2))
    await publisher.until(lambda: watch.index.overlaps(hashes(1, 2)) == {"e": 1}, "stored")
    publisher.number, publisher.sent = 0, []
    publisher.publish(event(7, 8))
    await publisher.until(lambda: watch.index.overlaps(hashes(7, 8)) == {"e": 1}, "stored anew")
    assert watch.index.overlaps(hashes(1, 2)) == {}
    assert watch.trust.state is Trust.TRUSTED


async def test_garbage_is_counted_and_what_follows_is_read(
    watch: Watch, publishers: Make, event: Make, hashes: Make
) -> None:
    publisher = publishers()
    await heard(watch, publisher, event, hashes)
    publisher.raw(b"one frame")
    publisher.raw(b"", b"short", b"")
    publisher.publish(payload=b"\xc1 not msgpack")
    publisher.publish(event(1, 2))
    await publisher.until(lambda: watch.index.overlaps(hashes(1, 2)) == {"e": 1}, "stored")
    assert watch.service.counts.garbage == 3
    assert watch.trust.state is Trust.UNTRUSTED


async def test_events_of_another_rank_are_not_taken_for_its_own(
    watch: Watch, publishers: Make, event: Make, hashes: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The publisher says that it is rank 0."""
    publisher = publishers()
    publisher.publish(event(1, 2))
    watch.follow(publisher, rank=1)
    await publisher.until(lambda: watch.service.counts.garbage == 1, "it was refused")
    assert watch.index.overlaps(hashes(1, 2)) == {}
    assert watch.trust.state is Trust.UNTRUSTED
    assert "it is of data-parallel rank 0, not of 1: kv_events names another rank's port" in caplog.text
    watch.follow(publisher, rank=0)
    await publisher.until(lambda: watch.index.overlaps(hashes(1, 2)) == {"e": 1}, "replayed to whom it belongs")
    assert watch.trust.state.value == "trusted"


async def test_a_flood_leaves_the_event_loop_to_others(
    watch: Watch, publishers: Make, event: Make, hashes: Make
) -> None:
    publisher = publishers()
    await heard(watch, publisher, event, hashes)
    for i in range(5_000):
        publisher.publish(event(2 * i, 2 * i + 1))
    turns = 0

    def done() -> bool:
        nonlocal turns
        turns += 1
        return len(watch.index) == 5_000

    await publisher.until(done, "all are entered")
    assert turns > 3, "the loop came round in between"


async def test_an_engine_that_leaves_is_forgotten(watch: Watch, publishers: Make, event: Make, hashes: Make) -> None:
    publisher = publishers()
    await heard(watch, publisher, event, hashes)
    publisher.publish(event(1, 2))
    await publisher.until(lambda: watch.index.overlaps(hashes(1, 2)) == {"e": 1}, "stored")
    watch.wanted = {}
    watch.service.reconcile()
    assert watch.index.overlaps(hashes(1, 2)) == {}
    assert not watch.service.following


async def test_a_publisher_that_goes_away_is_no_longer_believed(
    watch: Watch, publishers: Make, event: Make, hashes: Make
) -> None:
    publisher = publishers()
    await heard(watch, publisher, event, hashes)
    publisher.publish(event(1, 2))
    await publisher.until(lambda: watch.index.overlaps(hashes(1, 2)) == {"e": 1}, "stored")
    other = publishers()
    publisher.close()
    await other.until(lambda: watch.trust.state is Trust.SILENT, "the connection is gone")
    assert watch.index.overlaps(hashes(1, 2)) == {}
