"""One engine's events in order: what is missing is asked for again, and what stays missing costs the engine its trust.

No socket is touched here. `Feed` is told what arrived and says, through `ask`, from which number on it wants a replay.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from kvduplex_router.clock import Clock
from kvduplex_router.events.decode import BadEventError, Batch, Cleared, Event, Removed, Stored, decode_batch
from kvduplex_router.events.index import BlockIndex, TooManyEnginesError
from kvduplex_router.events.trust import Trust, TrustKeeper

__all__ = ["Feed", "FeedCounts"]

_log = logging.getLogger("kvduplex.router.events")
_REPLAY_S: Final = 5.0
_HELD: Final = 20_000
_SEQ_BYTES: Final = 8
_END: Final = b"\xff" * _SEQ_BYTES


class FeedCounts:
    """What arrived, by kind; all only grow."""

    __slots__ = ("batches", "gaps", "garbage", "replays", "restarts", "skipped")

    def __init__(self) -> None:
        self.batches = 0  # messages applied
        self.garbage = 0  # messages or events that could not be read
        self.gaps = 0  # times that messages were missing
        self.replays = 0  # replays asked for
        self.restarts = 0  # times that an engine began anew
        self.skipped = 0  # events of unknown kinds


class Feed:
    """See the module.

    Args:
        engine: The engine's name in the index.
        index: Where its blocks are entered.
        trust: Its trust.
        clock: Monotonic seconds.
        ask: Asks for a replay from a number on; None when the engine has no replay endpoint.
        rank: The data-parallel rank whose events these must be; None when that is of no matter.
        counts: What arrived.
    """

    def __init__(
        self,
        engine: str,
        *,
        index: BlockIndex,
        trust: TrustKeeper,
        clock: Clock,
        ask: Callable[[int], None] | None,
        rank: int | None = None,
        counts: FeedCounts | None = None,
    ) -> None:
        self._engine = engine
        self._index = index
        self._trust = trust
        self._clock = clock
        self._ask = ask
        self._rank = rank
        self.counts = counts or FeedCounts()
        self._expected: int | None = None
        self._group: int | None = None
        self._held: deque[tuple[int, bytes]] = deque()
        self._replay_until: float | None = None
        self._replay_start = 0
        self._replay_next = 0

    @property
    def replaying(self) -> bool:
        """Whether a replay is on its way."""
        return self._replay_until is not None

    def connected(self) -> None:
        """A connection came up, to an engine that may not be the one of before."""
        self._begin_anew()

    def disconnected(self) -> None:
        """The connection is gone, and with it what the engine held as far as anybody knows."""
        self._index.cleared(self._engine)
        self._trust.silent()
        self._expected = self._replay_until = None
        self._held.clear()

    def distrusted(self) -> None:
        """Its predictions were wrong: forget what is known and learn it anew."""
        _log.warning(
            "engine %s: its events do not agree with its cached-token counts; learning them anew", self._engine
        )
        self._begin_anew()

    def message(self, frames: list[bytes]) -> None:
        """A published message: topic, number, payload."""
        if len(frames) != 3 or len(frames[1]) != _SEQ_BYTES:  # noqa: PLR2004 - see the docstring
            self.counts.garbage += 1
            return
        number = int.from_bytes(frames[1], "big")
        if self._replay_until is None:
            self._live(number, frames[2])
        elif len(self._held) < _HELD:
            self._held.append((number, frames[2]))
        else:
            self._give_up("too much arrived while it replayed")
            self._live(number, frames[2])

    def replayed(self, frames: list[bytes]) -> None:
        """A message of a replay: empty, topic, number, payload; the number -1 ends it."""
        if len(frames) != 4 or len(frames[2]) != _SEQ_BYTES:  # noqa: PLR2004 - see the docstring
            self.counts.garbage += 1
            return
        if self._replay_until is None:
            return
        if frames[2] == _END:
            self._replay_ended()
            return
        number = int.from_bytes(frames[2], "big")
        if number > self._replay_next:
            self._lose("its replay begins too late")
        if number >= self._replay_next:
            self._replay_next = number + 1
            self._expected = number + 1
            self._apply(frames[3])

    def tick(self) -> None:
        """To be called about once a second: a replay that does not end is given up."""
        if self._replay_until is not None and self._clock() >= self._replay_until:
            self._give_up(f"no replay within {_REPLAY_S:g} s")

    def _begin_anew(self) -> None:
        self._index.cleared(self._engine)
        self._expected = None
        self._group = None
        self._trust.incomplete()
        if self._ask is not None:
            self._trust.complete()  # unless the replay has a hole
            self._replay_from(0)

    def _replay_from(self, number: int) -> None:
        if self._ask is None:
            return
        self.counts.replays += 1
        self._replay_until = self._clock() + _REPLAY_S
        self._replay_start = self._replay_next = number
        self._ask(number)

    def _replay_ended(self) -> None:
        self._replay_until = None
        self._expected = self._replay_next
        held, self._held = self._held, deque()
        for number, payload in held:
            if self.replaying:
                self._held.append((number, payload))
            elif number >= self._replay_next or (number == 0 and self._replay_start):  # the latter began anew
                self._live(number, payload)

    def _give_up(self, why: str) -> None:
        self._replay_until = None
        self._lose(why)
        held, self._held = self._held, deque()
        self._expected = None
        for number, payload in held:
            self._apply(payload)
            self._expected = number + 1

    def _live(self, number: int, payload: bytes) -> None:
        expected = self._expected
        if number == expected or expected is None:
            if number == 0:
                self._trust.complete()
        elif number == 0:
            self.counts.restarts += 1
            self._index.cleared(self._engine)
            self._trust.complete()
        elif number < expected:
            self.counts.restarts += 1
            self._begin_anew()
        else:
            self.counts.gaps += 1
            if self._ask is None:
                self._lose(f"{number - expected} messages are missing and it has no replay endpoint")
            else:
                self._replay_from(expected)
        if self.replaying:
            self._held.append((number, payload))
            return
        self._expected = number + 1
        self._apply(payload)

    def _lose(self, why: str) -> None:
        """What the engine removed in the meantime is not known: nothing of it can be believed."""
        if self._trust.state is not Trust.UNTRUSTED:
            _log.warning("engine %s: events lost: %s", self._engine, why)
        self._index.cleared(self._engine)
        self._trust.incomplete()

    def _apply(self, payload: bytes) -> None:
        self.counts.batches += 1
        try:
            batch = decode_batch(payload)
            self._check_sender(batch)
            self.counts.skipped += batch.skipped
            for event in batch.events:
                self._event(event)
        except BadEventError as error:
            self.counts.garbage += 1
            if self._trust.state is Trust.TRUSTED:
                _log.warning("engine %s: an event cannot be read: %s", self._engine, error)
                self._trust.incomplete()
        except TooManyEnginesError as error:
            if self._trust.state is not Trust.SILENT:
                _log.error("engine %s: %s; raise routing.events.max_engines", self._engine, error)
            self._trust.silent()

    def _check_sender(self, batch: Batch) -> None:
        if self._rank is not None and batch.rank not in (None, self._rank):
            raise BadEventError(
                f"it is of data-parallel rank {batch.rank}, not of {self._rank}: kv_events names another rank's port"
            )

    def _event(self, event: Event) -> None:
        index = self._index
        match event:
            case Stored():
                if not self._takes(event):
                    index.counts.other += len(event.names)
                    return
                if event.adapter is not None:
                    index.adapters.add(event.adapter)
                index.stored(self._engine, event.names, event.parent, event.tokens, event.block_size, event.extras)
            case Removed():
                if event.device and event.group == (self._group or 0):
                    index.removed(self._engine, event.names)
            case Cleared():
                index.cleared(self._engine)
                self._trust.complete()

    def _takes(self, event: Stored) -> bool:
        """Whether the blocks are of the one cache group that is indexed: the first that keeps whole prompts."""
        if not event.device or not event.whole:
            return False
        if self._group is None:
            self._group = event.group
        return event.group == self._group
