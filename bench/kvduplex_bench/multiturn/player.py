"""Clients that play conversations: each takes the conversation that has waited longest, and one turn of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.chat import Messages, Reply, chat_body
from kvduplex_bench.multiturn.corpus import Corpus
from kvduplex_bench.multiturn.target import Client
from kvduplex_bench.multiturn.workload import Workload

__all__ = ["Conversation", "Player", "Turn"]

_MOST_FAILURES = 10


@dataclass(slots=True)
class Conversation:
    """One conversation as it stands.

    Attributes:
        key: Names it, and its texts; unique in a run.
        prefix: Text of the constant prefix.
        messages: What was said.
        failed: A turn of it failed; it is not gone on with.
    """

    key: str
    prefix: str
    messages: Messages = field(default_factory=list)
    failed: bool = False

    def ask(self, text: str) -> None:
        """Add the user's next message; the first carries the prefix as the system's message before it."""
        if not self.messages and self.prefix:
            self.messages.append({"role": "system", "content": self.prefix})
        self.messages.append({"role": "user", "content": text})


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as the client saw it.

    Attributes:
        conversation: Its conversation's key.
        turn: Number in the conversation, from 0.
        at_s: When it was sent, in seconds since 1970; for ordering turns, not for measuring them.
        reply: The answer; None when it failed.
        error: Why it failed.
    """

    conversation: str
    turn: int
    at_s: float
    reply: Reply | None
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the record: times in seconds, no text."""
        line: dict[str, Any] = {"conversation": self.conversation, "turn": self.turn, "at_s": round(self.at_s, 3)}
        if self.reply is None:
            return line | {"error": self.error}
        reply = self.reply
        return line | {
            "ttft_s": round(reply.ttft_s, 6),
            "e2e_s": round(reply.e2e_s, 6),
            "gaps_s": [round(gap, 6) for gap in reply.gaps_s],
            "connect_s": round(reply.connect_s, 6),
            "prompt_tokens": reply.prompt_tokens,
            "answer_tokens": reply.answer_tokens,
            "cached_tokens": reply.cached_tokens,
            "plan": reply.plan,
        }


class Player:
    """Plays turns of conversations against one router.

    Args:
        workload: Lengths and clients.
        client: The router.
        corpus: Texts.
        model: Name of the model.
        fresh_ids: Give every turn a conversation id of its own, so that it continues nothing.
        told: Called with each turn as it ends.
    """

    def __init__(
        self,
        *,
        workload: Workload,
        client: Client,
        corpus: Corpus,
        model: str,
        fresh_ids: bool,
        told: Callable[[Turn], None],
    ) -> None:
        self._workload = workload
        self._client = client
        self._corpus = corpus
        self._model = model
        self._fresh_ids = fresh_ids
        self._told = told
        self._failures = 0

    async def play(self, conversations: Sequence[Conversation], turns: range) -> int:
        """Play `turns` of each conversation; returns how many were answered.

        Raises:
            UnreachableError: The router is gone.
            BenchError: Turn after turn fails.
        """
        waiting = deque((conversation, turn) for turn in turns[:1] for conversation in conversations)
        answered = 0

        async def work() -> None:
            nonlocal answered
            while waiting:
                conversation, turn = waiting.popleft()
                if conversation.failed:
                    continue
                answered += await self._one(conversation, turn)
                if turn + 1 in turns:
                    await asyncio.sleep(self._workload.think_s)
                    waiting.append((conversation, turn + 1))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._workload.clients, len(conversations))):
                    group.create_task(work())
        except* BenchError as failures:
            raise _first(failures) from failures
        return answered

    def ask(self, conversation: Conversation, turn: int) -> None:
        """Add the user's message of a turn."""
        conversation.ask(self._corpus.text(f"{conversation.key}/{turn}", self._workload.user_tokens))

    def conversation_id(self, conversation: Conversation, turn: int) -> str | None:
        """What a turn's request carries as ``conversation_id``."""
        if self._fresh_ids:
            return f"{conversation.key}/{turn}"
        return conversation.key if self._workload.explicit_ids else None

    async def _one(self, conversation: Conversation, turn: int) -> bool:
        self.ask(conversation, turn)
        body = chat_body(
            self._model,
            conversation.messages,
            answer_tokens=self._workload.answer_tokens,
            conversation=self.conversation_id(conversation, turn),
        )
        at_s = time.time()
        try:
            reply = await self._client.chat(body)
        except BenchError as error:
            self._failed(conversation, Turn(conversation.key, turn, at_s, None, str(error)), error)
            return False
        conversation.messages.append({"role": "assistant", "content": reply.text})
        self._told(Turn(conversation.key, turn, at_s, reply))
        return True

    def _failed(self, conversation: Conversation, turn: Turn, error: BenchError) -> None:
        conversation.failed = True
        self._failures += 1
        self._told(turn)
        if self._failures >= _MOST_FAILURES:
            raise BenchError(f"{self._failures} turns of one segment failed, the last with: {error}") from error


def _first(failures: BaseExceptionGroup[BenchError]) -> BenchError:
    """Clients fail of the same cause; the first to say so is enough."""
    one: BenchError | BaseExceptionGroup[BenchError] = failures
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    return one
