"""What the router knows of an engine beyond its health: what it sent there, what that costs, what it may believe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvduplex_router.clock import Clock
from kvduplex_router.events.trust import Trust, TrustKeeper
from kvduplex_router.fleet.engine import Engine, EngineRole
from kvduplex_router.routing.cost import EngineCost, EnginePace, Work

__all__ = ["Desk", "Desks", "Reservation"]

_OWN_SAMPLES: Final = 8
_TYPICAL_TOKENS: Final = 1_000
_MEMORY: Final = 16


class Desk:
    """One engine's figures.

    Attributes:
        pending_tokens: Prompt tokens to compute of requests sent there and not yet begun to be answered.
        serving_tokens: Prompt tokens of all requests that this router has there.
        computed_tokens: Prompt tokens computed there for this router so far.
        cost: What work costs there.
        pace: How fast engines of its role generate.
        trust: How far its events may be believed.
        belief: Part of what the router remembers of prompts sent there that the engine turned out to hold.
        typical: Running mean of the prompt tokens a request had it compute.
    """

    __slots__ = (
        "_clock", "_open", "_prior", "belief", "computed_tokens", "cost", "pace", "pending_tokens", "serving_tokens",
        "trust", "typical",
    )  # fmt: skip

    def __init__(self, prior: EngineCost, pace: EnginePace, clock: Clock) -> None:
        self.pending_tokens = 0
        self.serving_tokens = 0
        self.computed_tokens = 0
        self.pace = pace
        self._open: dict[Reservation, None] = {}
        self._prior = prior
        self._clock = clock
        self.cost = EngineCost(prior)
        self.trust = TrustKeeper()
        self.belief = 1.0
        self.typical: float = _TYPICAL_TOKENS

    @property
    def prices(self) -> EngineCost:
        """Its own cost model, or that of its role until it has been seen often enough."""
        return self.cost if self.cost.samples >= _OWN_SAMPLES else self._prior

    @property
    def pending(self) -> int:
        """Requests sent there and not yet begun to be answered."""
        return len(self._open)

    def uncomputed(self) -> Iterator[Sequence[int]]:
        """Units of prompts sent there and not yet computed, as their reservations were given them."""
        return (reservation.units for reservation in self._open if reservation.units)

    def opened(self, reservation: Reservation) -> None:
        """A request was sent there."""
        self._open[reservation] = None
        self.pending_tokens += reservation.computed

    def closed(self, reservation: Reservation) -> None:
        """Its prompt was computed, or it ended."""
        del self._open[reservation]
        self.pending_tokens -= reservation.computed
        self.computed_tokens += reservation.computed

    def wait_s(self, engine: Engine) -> float:
        """Seconds until it would begin with another request.

        They are the prompts ahead, what other requests slow it down, and by how much the oldest answer is overdue:
        an engine that hangs shows it by that alone.
        """
        prices = self.prices
        decoding = engine.in_flight
        load = engine.load
        ahead = float(self.pending_tokens)
        if load is not None:
            if load.waiting is not None and load.waiting > self.pending:
                ahead += (load.waiting - self.pending) * self.typical
            if load.running is not None and load.running > decoding:
                decoding = int(load.running)
        wait = prices.per_token * ahead + prices.per_running * decoding
        if self._open:
            oldest = next(iter(self._open))
            wait += max(0.0, self._clock() - oldest.began - oldest.expected_s)
        return wait

    @property
    def slowdown_s(self) -> float:
        """Seconds that an answer of typical length takes longer there for what the engine is serving already."""
        return self.pace.slowdown_s * self.serving_tokens

    def learn(self, work: Work, seconds: float) -> None:
        """A request's first token came after `seconds`."""
        self.cost.learn(work, seconds)
        self._prior.learn(work, seconds)
        self.typical += (work.computed - self.typical) / _MEMORY

    def remember(self, predicted: int, delivered: int) -> None:
        """So many tokens were remembered of a prompt, and so many were held."""
        if predicted > 0:
            self.belief += (min(1.0, delivered / predicted) - self.belief) / _MEMORY


class Desks:
    """A desk for each engine, made when it is first asked for.

    Args:
        clock: Monotonic seconds.

    Attributes:
        all_trusted: Whether the events of all engines were believed a moment ago.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.all_trusted = False
        self._desks: dict[str, Desk] = {}
        self._priors = {role: EngineCost() for role in EngineRole}
        self._paces = {role: EnginePace(generates=role is not EngineRole.PREFILL) for role in EngineRole}

    def judge(self, engines: Iterable[Engine]) -> None:
        """See whether all engines can be believed; to be called now and then."""
        desks = [self.of(engine) for engine in engines]
        self.all_trusted = bool(desks) and all(desk.trust.state is Trust.TRUSTED for desk in desks)

    def of(self, engine: Engine) -> Desk:
        """The engine's desk."""
        desk = self._desks.get(engine.name)
        if desk is None:
            desk = self._desks[engine.name] = Desk(self._priors[engine.role], self._paces[engine.role], self._clock)
        return desk

    def find(self, name: str) -> Desk | None:
        """The desk of that name."""
        return self._desks.get(name)

    def keep_only(self, names: Iterable[str]) -> None:
        """Clear the desks of engines that have left."""
        for name in set(self._desks).difference(names):
            del self._desks[name]


class Reservation:
    """A request's place in an engine's figures, from the decision on; every way a request can end leads through `end`.

    Args:
        desk: The engine's.
        engine: The engine.
        computed: Prompt tokens it is expected to compute.
        pulled: Prompt tokens it is expected to read from another.
        tokens: Prompt tokens altogether.
        clock: Monotonic seconds.
        units: Hashes of the prompt in units, where it matters that they will be held there.

    Attributes:
        computed: Prompt tokens it is expected to compute.
        ahead: Prompt tokens to compute of requests before it.
        began: When it was sent.
        running: Requests that were being decoded.
        expected_s: Seconds until its first token, as expected.
        first_s: As it came; None when it has not, or nothing shows it.
    """

    __slots__ = (
        "_before",
        "_clock",
        "_desk",
        "_left",
        "_open",
        "_pulled",
        "_serving",
        "ahead",
        "began",
        "computed",
        "expected_s",
        "first_s",
        "running",
        "tokens",
        "units",
    )

    def __init__(
        self,
        desk: Desk,
        engine: Engine,
        computed: int,
        pulled: int,
        tokens: int,
        clock: Clock,
        units: Sequence[int] = (),
    ) -> None:
        self._desk = desk
        self._clock = clock
        self.computed = computed
        self._pulled = pulled
        self._open = True
        self._left = False
        self._serving = 0
        self._before = 0
        self.tokens = tokens
        self.units = units
        self.ahead = desk.pending_tokens
        self.running = engine.in_flight - desk.pending
        self.began = clock()
        self.expected_s = desk.prices.seconds(Work(computed, self.ahead, self.running, pulled))
        self.first_s: float | None = None
        desk.opened(self)
        desk.serving_tokens += tokens

    def first(self) -> None:
        """The first token came: the prompt is computed."""
        if self._open:
            self.first_s = self._clock() - self.began
            self.computed_by_now()
            self._serving, self._before = self._desk.serving_tokens, self._desk.computed_tokens

    def computed_by_now(self) -> None:
        """The prompt is computed, as far as anybody can tell."""
        if self._open:
            self._open = False
            self._desk.closed(self)

    def end(self) -> None:
        """The request ended, however."""
        self.computed_by_now()
        if not self._left:
            self._left = True
            self._desk.serving_tokens -= self.tokens

    def learn(self, prompt: int | None, cached: int | None, generated: int | None = None) -> None:
        """What the engine said of a request that has just been answered teaches what work costs there."""
        if self.first_s is None:
            return
        if generated is not None:
            self._learn_pace(generated, self._clock() - self.began - self.first_s)
        known = prompt is not None and cached is not None
        computed = max(1, (prompt or 0) - (cached or 0)) if known else self.computed
        self._desk.learn(Work(computed, self.ahead, self.running, self._pulled), self.first_s)

    def _learn_pace(self, generated: int, seconds: float) -> None:
        """Leaving out the time that prompts took in between: who sends those is held to account for it elsewhere."""
        desk = self._desk
        stalled = desk.prices.per_token * (desk.computed_tokens - self._before)
        serving = (self._serving + desk.serving_tokens) / 2
        desk.pace.learn(generated=generated - 1, seconds=max(0.0, seconds - stalled), serving=serving)
