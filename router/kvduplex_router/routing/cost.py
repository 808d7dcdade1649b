"""What work at an engine costs in seconds, learned from how long it took.

One linear model an engine, fitted as requests end: the time to the first token is a constant, plus seconds per prompt
token to compute, its own and those ahead of it, plus seconds per request that is being decoded, plus seconds per token
read from another engine. A second one for what follows: a token of an answer takes a constant, plus seconds per prompt
token of all requests that the engine is serving, for their KV is read at every step.
Recursive least squares with forgetting follows engines that change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

__all__ = ["EngineCost", "EnginePace", "Work"]

_FORGETTING: Final = 0.99
_DOUBT: Final = 100.0
_DOUBT_MAX: Final = 1e4
_KILO: Final = 1000.0
_PRIOR: Final = (0.01, 0.05, 0.001, 0.01)
"""Seconds: constant; per thousand tokens computed; per request being decoded; per thousand tokens read."""


_PACE_PRIOR: Final = (0.02, 5e-5)
"""Seconds per token of an answer: constant; per thousand prompt tokens that the engine is serving."""
_PACE_ALONE: Final = (0.02, 0.0)
_TYPICAL_ANSWER: Final = 128
_MEMORY: Final = 64
_LEAST_ANSWER: Final = 16


class Work(msgspec.Struct, frozen=True):
    """A request as its engine met it.

    Attributes:
        computed: Prompt tokens it had to compute.
        ahead: Prompt tokens to compute of requests before it.
        running: Requests being decoded.
        pulled: Prompt tokens it read from another engine.
    """

    computed: float
    ahead: float = 0.0
    running: float = 0.0
    pulled: float = 0.0


class _Fit:
    """A linear function, fitted by recursive least squares with forgetting."""

    __slots__ = ("_doubt", "theta")

    def __init__(self, theta: Sequence[float]) -> None:
        self.theta = list(theta)
        self._doubt = [[_DOUBT if i == j else 0.0 for j in range(len(theta))] for i in range(len(theta))]

    def learn(self, x: Sequence[float], value: float, *, limit: float) -> None:
        """At `x` it was `value`; believed as far as it is off by `limit`."""
        doubt, theta, features = self._doubt, self.theta, range(len(x))
        px = [sum(row[j] * x[j] for j in features) for row in doubt]
        gain = 1.0 / (_FORGETTING + sum(x[i] * px[i] for i in features))
        error = value - sum(theta[i] * x[i] for i in features)
        error = max(-limit, min(limit, error))
        for i in features:
            theta[i] += px[i] * gain * error
            for j in features:
                doubt[i][j] = (doubt[i][j] - px[i] * px[j] * gain) / _FORGETTING
        if max(doubt[i][i] for i in features) > _DOUBT_MAX:  # a feature that stays away blows up otherwise
            self._doubt = [[each / 2 for each in row] for row in doubt]


class EngineCost:
    """See the module.

    Args:
        prior: What to believe before anything was seen; another engine's, or the built-in guess.
    """

    __slots__ = ("_computed", "_fit", "per_pulled", "per_running", "per_token", "samples")

    def __init__(self, prior: EngineCost | None = None) -> None:
        self._fit = _Fit(_PRIOR if prior is None else prior.coefficients)
        self.samples = 0
        self._computed = 0
        self._publish()

    @property
    def guessed(self) -> bool:
        """Whether the price of computing tokens rests on no prompt seen here."""
        return self._computed == 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """As fitted: seconds, per thousand tokens computed, per request decoded, per thousand tokens read."""
        return tuple(self._fit.theta)

    def seconds(self, work: Work) -> float:
        """Expected seconds to the first token."""
        constant = max(0.0, self._fit.theta[0])
        computing = self.per_token * (work.computed + work.ahead) + self.per_running * work.running
        return constant + computing + self.per_pulled * work.pulled

    def learn(self, work: Work, seconds: float) -> None:
        """It took `seconds` from the request to its first token."""
        x = (1.0, (work.computed + work.ahead) / _KILO, work.running, work.pulled / _KILO)
        limit = 3 * self.seconds(work) + 0.1  # one pause of a machine must not rewrite what many requests taught
        self._fit.learn(x, seconds, limit=limit)
        self.samples += 1
        self._computed += work.computed > 1
        self._publish()

    def _publish(self) -> None:
        """Slopes that cannot be negative, as plain numbers for whoever compares many engines."""
        _, computed, running, pulled = self._fit.theta
        self.per_token = max(1e-7, computed / _KILO)
        self.per_running = max(0.0, running)
        self.per_pulled = max(0.0, pulled / _KILO)


class EnginePace:
    """How fast an engine generates, and how much each request that it is serving slows it down.

    Args:
        generates: Whether it generates answers; one that computes prompts alone slows none down.

    Attributes:
        slowdown_s: Seconds that an answer of typical length takes longer for each prompt token that the engine is
            serving besides.
        samples: Answers that this rests on.
    """

    __slots__ = ("_answer", "_fit", "samples", "slowdown_s")

    def __init__(self, *, generates: bool = True) -> None:
        self._fit = _Fit(_PACE_PRIOR if generates else _PACE_ALONE)
        self._answer: float = _TYPICAL_ANSWER
        self.samples = 0
        self._publish()

    def learn(self, *, generated: int, seconds: float, serving: float) -> None:
        """An answer was generated; nothing is learned from very short ones.

        Args:
            generated: Its tokens after the first.
            seconds: From its first token to its last, without those in which the engine computed prompts.
            serving: Prompt tokens of all requests that the engine was serving meanwhile, this one's among them.
        """
        if generated < _LEAST_ANSWER:
            return
        each = seconds / generated
        known = max(0.0, self._fit.theta[0]) + max(0.0, self._fit.theta[1]) * serving / _KILO
        self._fit.learn((1.0, serving / _KILO), each, limit=2 * known + 0.01)
        self._answer += (generated - self._answer) / _MEMORY
        self.samples += 1
        self._publish()

    def _publish(self) -> None:
        self.slowdown_s = self._answer * max(0.0, self._fit.theta[1]) / _KILO
