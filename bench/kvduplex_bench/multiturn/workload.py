"""What is played: the published multi-turn workload and its knobs, checked before anything starts."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from kvduplex_bench.errors import BenchError

__all__ = ["CPU", "PUBLISHED", "QUICK", "Arm", "Workload"]

_TEMPLATE_TOKENS: Final = 16
"""Generous allowance for what a chat template puts around each message."""
_CHECK_TURNS: Final = 1


class Arm(StrEnum):
    """What happens to a turn's history."""

    OFF = "off"
    """Prefill computes what its own cache does not hold: classic one-way prefill and decode."""
    ON = "on"
    """KV flows back from the decode engine."""
    CONTINUE = "continue"
    """The decode engine goes on with the conversation itself, without a prefill hop."""
    FLOOR = "floor"
    """The whole history lies in the prefill engine's own prefix cache: nothing to compute or to move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations over a constant prefix, and who plays them.

    Attributes:
        conversations: Conversations of each segment.
        turns: Turns of a conversation, those of the warm-up included.
        user_tokens: Length of a user's message in tokens.
        answer_tokens: Length of an answer in tokens.
        prefixes: Lengths of the constant prefix in tokens, one point of the sweep each.
        clients: Requests in flight at most.
        active: Conversations that are open at the same time at most.
        warm_up: Share of a conversation's turns, from its first on, that is played and not counted.
        think_s: Seconds between an answer and the next turn of its conversation.
        shared_prefix: Whether all conversations of a point begin with the same prefix, as with a system prompt.
        explicit_ids: Whether requests carry ``conversation_id``; else the router has to recognise the conversation.
        repeats: How often the sweep is played, with other texts.
        seed: Of all texts.
    """

    conversations: int = 10
    turns: int = 10
    user_tokens: int = 150
    answer_tokens: int = 300
    prefixes: tuple[int, ...] = (2_000, 4_000, 8_000, 12_000, 16_000, 20_000, 24_000)
    clients: int = 2
    active: int = 10
    warm_up: float = 0.2
    think_s: float = 0.0
    shared_prefix: bool = True
    explicit_ids: bool = True
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be played.

        Raises:
            BenchError: Names the option, its value, and what would do.
        """
        for option in ("conversations", "user_tokens", "answer_tokens", "clients", "active", "repeats"):
            self._require(getattr(self, option) >= 1, option, "must be at least 1")
        self._require(self.turns >= 2, "turns", "must be at least 2: the first turn has no history to reuse")  # noqa: PLR2004
        self._require(0 <= self.warm_up < 1, "warm_up", "is a share of the turns, from 0 to below 1")
        self._require(self.warm_up_turns < self.turns, "warm_up", f"leaves none of {self.turns} turns to measure")
        self._require(self.think_s >= 0, "think_s", "must not be negative")
        self._require(math.isfinite(self.think_s), "think_s", "must end")
        self._require(bool(self.prefixes), "prefixes", "must name at least one length")
        self._require(min(self.prefixes) >= 0, "prefixes", "must not be negative")
        self._require(len(set(self.prefixes)) == len(self.prefixes), "prefixes", "must differ from each other")
        self._require(
            self.clients <= min(self.active, self.conversations),
            "clients",
            f"exceeds the {min(self.active, self.conversations)} conversations that are open at a time",
        )

    def _require(self, holds: bool, option: str, what: str) -> None:
        if not holds:
            flag = "--think-time" if option == "think_s" else "--" + option.replace("_", "-")
            raise BenchError(f"{flag} {getattr(self, option)}: {what}")

    @property
    def warm_up_turns(self) -> int:
        """Turns of each conversation that are not counted; the first never is, it has nothing to reuse."""
        return max(1, math.ceil(self.warm_up * self.turns))

    @property
    def measured_turns(self) -> int:
        """Counted turns of a segment."""
        return self.conversations * (self.turns - self.warm_up_turns)

    @property
    def longest(self) -> int:
        """Most tokens that a context can have, with room for the turn that checks exactness."""
        turn = self.user_tokens + self.answer_tokens + 2 * _TEMPLATE_TOKENS
        return max(self.prefixes) + _TEMPLATE_TOKENS + (self.turns + _CHECK_TURNS) * turn

    def must_fit(self, max_model_len: int) -> None:
        """Refuse conversations that the engines cannot hold.

        Raises:
            BenchError: The longest context exceeds `max_model_len` tokens.
        """
        if self.longest > max_model_len:
            raise BenchError(
                f"--prefixes {max(self.prefixes)}: with {self.turns} turns a context grows to {self.longest} tokens, "
                f"and the engines hold {max_model_len}; shorten prefix or conversation, or raise --max-model-len"
            )

    def as_json(self) -> dict[str, Any]:
        """All knobs."""
        return asdict(self)

    @property
    def fingerprint(self) -> str:
        """The same for the same knobs."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


PUBLISHED: Final = Workload()
"""As published with vLLM's bidirectional transfer; for accelerators."""

CPU: Final = Workload(conversations=1, turns=3, answer_tokens=200, clients=1, active=1)
"""What two CPU cores play in about 20 minutes: the same prefixes, one conversation at a time."""

QUICK: Final = Workload(
    conversations=1, turns=2, answer_tokens=96, clients=1, active=1, prefixes=(2_000, 8_000), repeats=1
)
"""What they play in three minutes, starts included: whether everything works, not how fast it is."""
