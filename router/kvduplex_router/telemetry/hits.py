"""Why prompt tokens had to be computed: a doctor for hit rates.

Every prompt token an engine counted has one of four fates. It was cached. It was expected at that engine and was not
there, so it had been evicted: *memory*. It was held by another engine than the one chosen: *routing*. Or no engine held
it: it is *new*, which is as it should be at the end of a prompt, and the prompt's structure when it is most of it.
Where nothing is known of what engines hold, the reasons count for which turns could not use their last turn's KV.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from kvduplex_router.clock import Clock
from kvduplex_router.telemetry.families import Family
from kvduplex_router.telemetry.structure import Place, PromptWatch, usual

__all__ = [
    "Cause", "Counts", "Diagnosis", "HitDoctor", "Loss", "Seen", "combined", "diagnoses", "troubles",
]  # fmt: skip

_BUCKET_S: Final = 30.0
_RECENT: Final = 10
_BASELINE: Final = 120
_ENOUGH_TOKENS: Final = 2_000
_FALLEN: Final = 0.8
_FULL: Final = 0.9
_GOOD: Final = 0.5
_CLASSES: Final = 64


class Loss(StrEnum):
    """What became of prompt tokens that were computed."""

    MEMORY = "memory"
    ROUTING = "routing"
    NEW = "new"


class Cause(StrEnum):
    """What a hit rate suffers from."""

    NOTHING = "nothing"
    PROMPT_STRUCTURE = "prompt_structure"
    ROUTING = "routing"
    MEMORY_PRESSURE = "memory_pressure"
    UNKNOWN = "unknown"


_CAUSES: Final = {
    Loss.MEMORY: Cause.MEMORY_PRESSURE, Loss.ROUTING: Cause.ROUTING, Loss.NEW: Cause.PROMPT_STRUCTURE,
}  # fmt: skip

REFUSALS: Final[Mapping[str, Loss]] = {
    "expired": Loss.MEMORY, "lease_lost": Loss.MEMORY,
    "engine_gone": Loss.ROUTING, "engine_restarted": Loss.ROUTING,
    "history_changed": Loss.NEW, "answer_changed": Loss.NEW,
}  # fmt: skip
"""What a refused reuse speaks for, by the refusal's reason; others speak for nothing."""


class Counts(msgspec.Struct):
    """Amounts of a time.

    Attributes:
        prompt: Prompt tokens.
        cached: Of those, tokens that were not computed.
        looked_up: Prompt tokens of requests for which it was known what engines hold.
        lost: Of these, tokens that were computed, by what became of them.
        refused: Turns that could not use their last turn's KV, by what that speaks for.
    """

    prompt: int = 0
    cached: int = 0
    looked_up: int = 0
    lost: dict[Loss, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Loss, 0))
    refused: dict[Loss, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Loss, 0))

    @property
    def rate(self) -> float | None:
        """Cached share; None of too little."""
        return self.cached / self.prompt if self.prompt >= _ENOUGH_TOKENS else None

    def share(self, loss: Loss) -> float:
        """Share of a loss in what was looked up, else in the refused turns; 0 of nothing."""
        if self.looked_up >= _ENOUGH_TOKENS:
            return self.lost[loss] / self.looked_up
        refused = sum(self.refused.values())
        return self.refused[loss] / refused if refused else 0.0

    @classmethod
    def sum(cls, several: Sequence[Counts]) -> Counts:
        """All together."""
        total = cls()
        for each in several:
            total.prompt += each.prompt
            total.cached += each.cached
            total.looked_up += each.looked_up
            for loss in Loss:
                total.lost[loss] += each.lost[loss]
                total.refused[loss] += each.refused[loss]
        return total


class Diagnosis(msgspec.Struct, frozen=True):
    """What is to be said of one class.

    Attributes:
        workload: The class.
        rate: Cached share of the last five minutes' prompt tokens; None of too little.
        baseline: The same of up to an hour before; None of too little.
        fallen: Whether it fell by a fifth or more.
        shares: Of what was computed, by what became of it; of refused turns where nothing else is known.
        cause: What it suffers from.
        because: In words, with what to do.
        differs: Where its prompts most often start to differ, and in what share of the comparisons.
    """

    workload: str
    rate: float | None
    baseline: float | None
    fallen: bool
    shares: Mapping[str, float]
    cause: Cause
    because: str
    differs: tuple[Place, float] | None = None

    def as_builtins(self) -> dict[str, Any]:
        """For JSON."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        del told["differs"]
        place = None if self.differs is None else {**msgspec.to_builtins(self.differs[0]), "share": self.differs[1]}
        return {**told, "differs_at": place}


class Seen(msgspec.Struct, frozen=True):
    """What was seen of one class.

    Attributes:
        workload: The class.
        recent: Amounts of the last five minutes.
        earlier: Amounts of up to an hour before.
        places: Where prompts started to differ lately.
    """

    workload: str
    recent: Counts
    earlier: Counts
    places: list[Place]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[Seen])


class HitDoctor:
    """Keeps what is needed for a diagnosis; a few hundred bytes a class and half minute.

    Args:
        clock: Monotonic seconds.
        look_s: Seconds between two prompts that are looked at for their structure.
    """

    def __init__(self, clock: Clock, *, look_s: float = 0.2) -> None:
        self._clock = clock
        self._look_s = look_s
        self._look_at = float("-inf")
        self._buckets: dict[str, deque[tuple[int, Counts]]] = {}
        self.prompts = PromptWatch()
        self.lost: dict[tuple[str, Loss], int] = {}

    @property
    def looks(self) -> bool:
        """Whether the next prompt should be shown to `prompts`; true once every `look_s`."""
        now = self._clock()
        if now < self._look_at:
            return False
        self._look_at = now + self._look_s
        return True

    def counted(self, workload: str, prompt: int, cached: int, held: tuple[int, int] | None) -> None:
        """An engine counted a prompt.

        Args:
            workload: Class.
            prompt: Its tokens.
            cached: Of those, tokens that were not computed.
            held: Tokens of it that were expected at that engine, and the most that any engine was expected to hold;
                None when nothing is known.
        """
        counts = self._now(workload)
        counts.prompt += prompt
        counts.cached += cached
        if held is None:
            return
        counts.looked_up += prompt
        here, best = (min(each, prompt) for each in held)
        losses = {
            Loss.MEMORY: max(0, here - cached),
            Loss.ROUTING: max(0, best - max(here, cached)),
            Loss.NEW: prompt - max(best, cached),
        }
        for loss, tokens in losses.items():
            counts.lost[loss] += tokens
            self.lost[workload, loss] = self.lost.get((workload, loss), 0) + tokens

    def refused(self, workload: str, reason: str) -> None:
        """A turn could not use its last turn's KV."""
        if (loss := REFUSALS.get(reason)) is not None:
            self._now(workload).refused[loss] += 1

    def families(self) -> Iterator[Family]:
        """For metrics, see `kvduplex_router.telemetry.families`."""
        lost = "Prompt tokens that were computed, by what became of them, where that is known."
        samples = [((workload, loss.value), float(tokens)) for (workload, loss), tokens in self.lost.items()]
        yield "counter", "lost_tokens", lost, ("class", "cause"), samples

    def told(self) -> bytes:
        """What was seen of every class, as `combined` reads it."""
        newest = int(self._clock() / _BUCKET_S)
        seen: list[Seen] = []
        for workload, buckets in self._buckets.items():
            recent = Counts.sum([counts for number, counts in buckets if number > newest - _RECENT])
            earlier = Counts.sum([counts for number, counts in buckets if number <= newest - _RECENT])
            seen.append(Seen(workload, recent, earlier, self.prompts.places(workload)))
        return _ENCODER.encode(seen)

    def _now(self, workload: str) -> Counts:
        number = int(self._clock() / _BUCKET_S)
        buckets = self._buckets.get(workload)
        if buckets is None:
            if len(self._buckets) >= _CLASSES:
                return Counts()
            buckets = self._buckets[workload] = deque(maxlen=_RECENT + _BASELINE)
        if not buckets or buckets[-1][0] != number:
            buckets.append((number, Counts()))
            while buckets[0][0] <= number - _RECENT - _BASELINE:
                buckets.popleft()
        return buckets[-1][1]


def combined(told: Iterable[bytes]) -> list[Seen]:
    """What several processes saw, by what each `HitDoctor.told`; classes in order of their names."""
    by_class: dict[str, list[Seen]] = {}
    for each in itertools.chain.from_iterable(map(_DECODER.decode, told)):
        by_class.setdefault(each.workload, []).append(each)
    return [
        Seen(
            workload,
            Counts.sum([each.recent for each in seen]),
            Counts.sum([each.earlier for each in seen]),
            [place for each in seen for place in each.places],
        )
        for workload, seen in sorted(by_class.items())
    ]


def diagnoses(seen: Iterable[Seen], kv_usages: Mapping[str, float]) -> list[Diagnosis]:
    """One for every class; pure.

    Args:
        seen: What was seen of each.
        kv_usages: Part of its KV cache that an engine uses, by engine, of those that say.
    """
    return [_diagnose(each, kv_usages) for each in seen]


def troubles(found: Iterable[Diagnosis]) -> dict[str, str]:
    """In words, for the classes that suffer from something known."""
    known = (Cause.PROMPT_STRUCTURE, Cause.ROUTING, Cause.MEMORY_PRESSURE)
    return {each.workload: each.because for each in found if each.cause in known}


def _diagnose(seen: Seen, kv_usages: Mapping[str, float]) -> Diagnosis:
    """Compare a class's last minutes with the time before them."""
    recent, earlier, differs = seen.recent, seen.earlier, usual(seen.places)
    rate, baseline = recent.rate, earlier.rate
    fallen = rate is not None and baseline is not None and rate < _FALLEN * baseline
    shares = {loss: recent.share(loss) for loss in Loss}
    grown = {loss: shares[loss] - (earlier.share(loss) if baseline is not None else 0.0) for loss in Loss}
    if rate is None:
        cause, because = Cause.UNKNOWN, "too few prompt tokens were counted in the last five minutes"
    elif baseline is not None and not fallen:
        cause, because = Cause.NOTHING, "the hit rate is about what it was"
    elif baseline is None and rate >= _GOOD:
        cause, because = Cause.NOTHING, "there is no earlier time to compare with, and most tokens are cached"
    elif not any(shares.values()):
        cause, because = Cause.UNKNOWN, "nothing is known of what engines hold; a policy that looks at prompts tells"
    else:
        worst = max(Loss, key=lambda loss: grown[loss])
        cause, because = _CAUSES[worst], _words(worst, shares[worst], differs, kv_usages)
    told = {loss.value: share for loss, share in shares.items()}
    return Diagnosis(seen.workload, rate, baseline, fallen, told, cause, because, differs)


def _words(loss: Loss, share: float, differs: tuple[Place, float] | None, kv_usages: Mapping[str, float]) -> str:
    if loss is Loss.ROUTING:
        return (
            f"{share:.0%} of prompt tokens were held by another engine than the one chosen, or by one that left: look "
            "for engines that are saturated, restarted or drained, and at the class's policy and weights"
        )
    if loss is Loss.MEMORY:
        full = sorted(name for name, use in kv_usages.items() if use >= _FULL)
        told = f"{', '.join(full[:4])} use {_FULL:.0%} of their KV cache or more; " if full else ""
        return (
            f"{share:.0%} of prompt tokens were expected where the request was sent and were gone: {told}give engines "
            "more KV memory or fewer conversations, or let leases live shorter"
        )
    if differs is None:
        return f"{share:.0%} of prompt tokens were held by no engine; too few prompts were compared to say more"
    place, often = differs
    where = place.member if place.message is None else f"{place.member}[{place.message}]"
    unit = "character" if place.in_text else "character of its JSON"
    return (
        f"{share:.0%} of prompt tokens were held by no engine: {often:.0%} of the prompts compared start to differ at "
        f"{where}, {unit} {place.character}. Put what varies behind what is always the same"
    )
