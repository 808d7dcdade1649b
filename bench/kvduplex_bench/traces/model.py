"""What a trace is made of.

Content is named, not written out: segments of equal key and length hold equal text, so prefixes are shared exactly
where keys are. `text` writes it out for engines that want text; simulations need the names alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["Conversation", "Segment", "Trace", "Turn"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One message.

    Attributes:
        role: ``system``, ``user`` or ``tool``.
        key: Names its content.
        tokens: About how long it is.
        text: Its content, when it was given.
    """

    role: str
    key: str
    tokens: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
        gap_s: Seconds from the end of the answer before it.
        new: Messages that it adds.
        output_tokens: Tokens of its answer.
    """

    gap_s: float
    new: tuple[Segment, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A run of turns; each sends all messages before it, answers included.

    Attributes:
        id: Unique in the trace.
        kind: Workload class.
        start: When its first turn begins, in seconds at a rate of one conversation a second.
        turns: In order.
    """

    id: str
    kind: str
    start: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A workload.

    Attributes:
        name: For tables.
        conversations: In order of `start`.
        about: What it stands for and where its numbers come from.
        closed: Conversations have no arrival times; a fixed number of clients works them off.
    """

    name: str
    conversations: tuple[Conversation, ...]
    about: str
    closed: bool = False

    @property
    def requests(self) -> int:
        """Turns of all conversations."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, without what chat templates add."""
        return sum(sum(prompts(conversation)) for conversation in self.conversations)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(turn.output_tokens for each in self.conversations for turn in each.turns)

    def starting_by(self, seconds: float, rate: float) -> Trace:
        """The conversations that begin within `seconds` at `rate` conversations a second."""
        kept = tuple(each for each in self.conversations if each.start <= seconds * rate)
        return replace(self, conversations=kept)


def prompts(conversation: Conversation) -> Iterator[int]:
    """Tokens of each turn's prompt."""
    length = 0
    for turn in conversation.turns:
        length += sum(segment.tokens for segment in turn.new)
        yield length
        length += turn.output_tokens
