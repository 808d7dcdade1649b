"""Conversations as clients really send them: appended, edited, cut, branched, told again, and claimed wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

Messages = list[dict[str, Any]]

WORDS = [
    "river",
    "stone",
    "light",
    "paper",
    "engine",
    "morning",
    "garden",
    "copper",
    "window",
    "letter",
    "silver",
    "market",
    "winter",
    "bridge",
    "thunder",
    "harbour",
    "candle",
    "forest",
    "mirror",
    "island",
    "signal",
    "velvet",
    "orbit",
    "pepper",
    "station",
    "meadow",
    "lantern",
    "compass",
    "anchor",
]


@dataclass(frozen=True)
class Turn:
    """One turn to be played.

    Attributes:
        kind: What the client did to the history.
        messages: What it sends.
        claim: Source of the handle that goes along: the conversation and turn whose answer left it, or None.
        answer_tokens: Length of the answer.
        evict: Whether the prefill engine loses its prefix cache first, as by eviction or another replica.
    """

    kind: str
    messages: Messages
    claim: str | None
    answer_tokens: int
    evict: bool


@dataclass
class Conversation:
    """What client and router remember of one conversation."""

    name: str
    messages: Messages
    handle: str | None = None  # of the last turn
    told: bool = False
    past: list[tuple[Messages, str]] = field(default_factory=list)

    def answered(self, messages: Messages, content: str, handle: str) -> None:
        self.messages = [*messages, {"role": "assistant", "content": content}]
        self.handle = handle
        self.past.append((self.messages, handle))


class Histories:
    """An endless, seeded stream of turns over a few conversations.

    Args:
        seed: Of the pseudo-random numbers.
        conversations: How many are told at a time.
        short: End a conversation after its first turn that is not an opening, so that no fault can outlive its turn.
    """

    def __init__(self, seed: int, conversations: int = 6, *, short: bool = False) -> None:
        self._random = random.Random(seed)
        self._short = short
        self._conversations = [self._fresh() for _ in range(conversations)]
        self._playing: Conversation = self._conversations[0]
        self._deck: list[str] = []

    def next(self) -> Turn:
        index = self._random.randrange(len(self._conversations))
        playing = self._conversations[index]
        if playing.told or sum(len(str(m["content"])) for m in playing.messages) > 9000:
            playing = self._conversations[index] = self._fresh()
        self._playing = playing
        if playing.handle is None:
            kind, turn = "first", self._first(playing)
        else:
            kind = self._draw()
            turn = _KINDS[kind][1](self, playing)
            playing.told = self._short
        long_answer = self._random.random() < 0.08
        return replace(
            turn,
            kind=kind,
            answer_tokens=90 if long_answer else self._random.randint(4, 12),
            evict=self._random.random() < 0.75,
        )

    def answered(self, turn: Turn, content: str, handle: str) -> None:
        self._playing.answered(turn.messages, content, handle)

    def _draw(self) -> str:
        """A kind from a shuffled deck, so that a short run has all of them."""
        if not self._deck:
            self._deck = [kind for kind, (weight, _) in _KINDS.items() for _ in range(weight)]
            self._random.shuffle(self._deck)
        return self._deck.pop()

    def text(self, words: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(words))

    def _fresh(self) -> Conversation:
        name = f"{self._random.getrandbits(32):08x}"
        system = f"You are {self.text(3)}. " + self.text(self._random.randint(40, 160))
        return Conversation(name, [{"role": "system", "content": system}])

    def _user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.text(self._random.randint(5, 40)) + "?"}

    def _turn(self, messages: Messages, claim: str | None) -> Turn:
        return Turn("", messages, claim, 0, evict=False)

    def _first(self, playing: Conversation) -> Turn:
        return self._turn([*playing.messages, self._user()], None)

    def append(self, playing: Conversation) -> Turn:
        return self._turn([*playing.messages, self._user()], playing.handle)

    def edit(self, playing: Conversation) -> Turn:
        messages = [dict(message) for message in playing.messages]
        victim = self._random.choice(messages)
        words = str(victim["content"]).split() or ["empty"]
        words[self._random.randrange(len(words))] = self._random.choice(WORDS)
        victim["content"] = " ".join(words)
        return self._turn([*messages, self._user()], playing.handle)

    def insert(self, playing: Conversation) -> Turn:
        messages = list(playing.messages)
        messages.insert(self._random.randint(1, len(messages)), {"role": "user", "content": self.text(6)})
        return self._turn([*messages, self._user()], playing.handle)

    def delete(self, playing: Conversation) -> Turn:
        messages = list(playing.messages)
        del messages[self._random.randrange(1, len(messages))]
        return self._turn([*messages, self._user()], playing.handle)

    def swap(self, playing: Conversation) -> Turn:
        messages = list(playing.messages)
        first, second = self._random.sample(range(len(messages)), 2)
        messages[first], messages[second] = messages[second], messages[first]
        return self._turn([*messages, self._user()], playing.handle)

    def truncate(self, playing: Conversation) -> Turn:
        keep = self._random.randint(1, len(playing.messages))
        return self._turn([*playing.messages[:keep], self._user()], playing.handle)

    def regenerate(self, playing: Conversation) -> Turn:
        return self._turn(playing.messages[:-1], playing.handle)

    def branch(self, playing: Conversation) -> Turn:
        messages, handle = self._random.choice(playing.past)
        return self._turn([*messages, self._user()], handle)

    def strip_reasoning(self, playing: Conversation) -> Turn:
        messages = [dict(message) for message in playing.messages]
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = str(message["content"])[len(str(message["content"])) // 2 :]
        return self._turn([*messages, self._user()], playing.handle)

    def retokenise(self, playing: Conversation) -> Turn:
        """Text that reads the same but is not the same tokens: joined words, other spaces."""
        messages = [dict(message) for message in playing.messages]
        messages[-1]["content"] = "  ".join(str(messages[-1]["content"]).split())
        return self._turn([*messages, self._user()], playing.handle)

    def wrong_handle(self, playing: Conversation) -> Turn:
        return self._turn([*playing.messages, self._user()], f"nobody-{self._random.getrandbits(32):08x}")

    def other_tenant(self, playing: Conversation) -> Turn:
        others = [other for other in self._conversations if other is not playing and other.handle]
        handle = self._random.choice(others).handle if others else None
        return self._turn([*playing.messages, self._user()], handle)

    def replayed(self, playing: Conversation) -> Turn:
        """The handle of an earlier turn, read before."""
        return self._turn([*playing.messages, self._user()], self._random.choice(playing.past)[1])

    def no_handle(self, playing: Conversation) -> Turn:
        return self._turn([*playing.messages, self._user()], None)


_KINDS: dict[str, tuple[int, Callable[[Histories, Conversation], Turn]]] = {
    "append": (4, Histories.append),
    "edit": (1, Histories.edit),
    "insert": (1, Histories.insert),
    "delete": (1, Histories.delete),
    "swap": (1, Histories.swap),
    "truncate": (1, Histories.truncate),
    "regenerate": (2, Histories.regenerate),
    "branch": (1, Histories.branch),
    "strip_reasoning": (1, Histories.strip_reasoning),
    "retokenise": (1, Histories.retokenise),
    "wrong_handle": (1, Histories.wrong_handle),
    "other_tenant": (1, Histories.other_tenant),
    "replayed": (1, Histories.replayed),
    "no_handle": (1, Histories.no_handle),
}
KINDS = frozenset(_KINDS)
"""Every way a turn can relate to the one before it."""
