"""What work at an engine costs in seconds, learned from how long it took.

One linear model an engine, fitted as requests end: the time to the first token is a constant, plus seconds per prompt
token to compute, its own and those ahead of it, plus seconds per request that is being decoded, plus seconds per token
read from another engine. Recursive least squares with forgetting follows engines that change.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["EngineCost", "Work"]

_FEATURES: Final = 4
_FORGETTING: Final = 0.99
_DOUBT: Final = 100.0
_DOUBT_MAX: Final = 1e4
_KILO: Final = 1000.0
_PRIOR: Final = (0.01, 0.05, 0.001, 0.01)
"""Seconds: constant; per thousand tokens computed; per request being decoded; per thousand tokens read."""


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


class EngineCost:
    """See the module.

    Args:
        prior: What to believe before anything was seen; another engine's, or the built-in guess.
    """

    __slots__ = ("_computed", "_doubt", "_theta", "per_pulled", "per_running", "per_token", "samples")

    def __init__(self, prior: EngineCost | None = None) -> None:
        self._theta = list(_PRIOR if prior is None else prior.coefficients)
        self._doubt = [[_DOUBT if i == j else 0.0 for j in range(_FEATURES)] for i in range(_FEATURES)]
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
        return tuple(self._theta)

    def seconds(self, work: Work) -> float:
        """Expected seconds to the first token."""
        constant = max(0.0, self._theta[0])
        computing = self.per_token * (work.computed + work.ahead) + self.per_running * work.running
        return constant + computing + self.per_pulled * work.pulled

    def learn(self, work: Work, seconds: float) -> None:
        """It took `seconds` from the request to its first token."""
        x = (1.0, (work.computed + work.ahead) / _KILO, work.running, work.pulled / _KILO)
        doubt, theta = self._doubt, self._theta
        px = [sum(row[j] * x[j] for j in range(_FEATURES)) for row in doubt]
        gain = 1.0 / (_FORGETTING + sum(x[i] * px[i] for i in range(_FEATURES)))
        error = seconds - sum(theta[i] * x[i] for i in range(_FEATURES))
        limit = 3 * self.seconds(work) + 0.1  # one pause of a machine must not rewrite what many requests taught
        error = max(-limit, min(limit, error))
        for i in range(_FEATURES):
            theta[i] += px[i] * gain * error
            for j in range(_FEATURES):
                doubt[i][j] = (doubt[i][j] - px[i] * px[j] * gain) / _FORGETTING
        if max(doubt[i][i] for i in range(_FEATURES)) > _DOUBT_MAX:  # a feature that stays away blows up otherwise
            self._doubt = [[value / 2 for value in row] for row in doubt]
        self.samples += 1
        self._computed += work.computed > 1
        self._publish()

    def _publish(self) -> None:
        """Slopes that cannot be negative, as plain numbers for whoever compares many engines."""
        self.per_token = max(1e-7, self._theta[1] / _KILO)
        self.per_running = max(0.0, self._theta[2])
        self.per_pulled = max(0.0, self._theta[3] / _KILO)
