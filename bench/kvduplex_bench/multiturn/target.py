"""What is measured: a router for each arm, the engines behind it, and a plain engine to compare answers with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.chat import Messages, Reply, chat_body, read_reply
from kvduplex_bench.multiturn.corpus import sample
from kvduplex_bench.multiturn.engines import Engines
from kvduplex_bench.multiturn.wire import BrokenExchangeError, Origin, exchange
from kvduplex_bench.multiturn.workload import Arm

__all__ = ["Client", "Served", "Target"]

_CHAT = "/v1/chat/completions"
_OK = 200
_FEW_WORDS, _MORE_WORDS = 200, 2_000


@dataclass(frozen=True, slots=True)
class Target:
    """A running cluster.

    Attributes:
        setting: What sets it apart from others in the same run, as ``leased, prefill cache off``.
        routers: Base URL for each arm that it can play.
        engines: Whose metrics are read.
        reference: An engine that computes everything itself; None leaves answers unchecked.
        fresh_ids: ``off`` shares a router with ``on``, and every turn gets a conversation id of its own there.
    """

    setting: str
    routers: Mapping[Arm, str]
    engines: Engines
    reference: str | None = None
    fresh_ids: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """The model that a router serves.

    Attributes:
        name: As requests give it.
        max_model_len: Longest context in tokens; None when the server does not say.
        tokens_per_word: Of the generated texts.
    """

    name: str
    max_model_len: int | None
    tokens_per_word: float


class Client:
    """Sends requests to one server.

    Args:
        url: Base URL.
        option: The option it came from, for messages.
        headers: Sent with every request, as for an API key.
        timeout_s: Longest time of one request.
    """

    def __init__(self, url: str, *, option: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._origin = Origin.parse(url, option=option)
        self._headers = dict(headers)
        self._timeout_s = timeout_s

    async def chat(self, body: bytes) -> Reply:
        """A streamed chat answer.

        Raises:
            UnreachableError: No connection.
            BrokenExchangeError: No complete answer, or an error.
        """
        answer = await exchange(self._origin, _CHAT, body, headers=self._headers, timeout_s=self._timeout_s)
        try:
            return read_reply(answer)
        except BrokenExchangeError as error:
            raise BrokenExchangeError(f"{self._origin.url}{_CHAT}: {error}") from error

    async def json(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        """A whole JSON answer.

        Raises:
            UnreachableError: No connection.
            BrokenExchangeError: No complete answer, or an error.
        """
        answer = await exchange(self._origin, path, body, headers=self._headers, timeout_s=self._timeout_s)
        if answer.status != _OK:
            shown = answer.body[:300].decode(errors="replace")
            raise BrokenExchangeError(f"{self._origin.url}{path}: answered {answer.status}: {shown}")
        try:
            value = json.loads(answer.body)
        except ValueError as error:
            raise BrokenExchangeError(f"{self._origin.url}{path}: answered something that is not JSON") from error
        if not isinstance(value, dict):
            raise BrokenExchangeError(f"{self._origin.url}{path}: answered JSON that is not an object")
        return value

    async def whole(self, model: str, messages: Messages, *, answer_tokens: int, **more: Any) -> dict[str, Any]:
        """A chat answer that is not streamed.

        Raises:
            UnreachableError: No connection.
            BrokenExchangeError: No complete answer, or an error.
        """
        body = chat_body(
            model, messages, answer_tokens=answer_tokens, **{"stream": False, "stream_options": None} | more
        )
        return await self.json(_CHAT, body)

    async def served(self, model: str | None) -> Served:
        """Find out what is served, and how long its words are in tokens.

        Args:
            model: Which of several models; None for the only one.

        Raises:
            BenchError: The server does not answer, serves several models, or not that one.
        """
        listed = (await self.json("/v1/models")).get("data") or []
        found = {str(one.get("id")): one for one in listed}
        name = model or (next(iter(found)) if len(found) == 1 else None)
        if name is None or name not in found:
            raise BenchError(
                f"--model {model or ''}: {self._origin.url} serves {', '.join(found) or 'no model'}; name one"
            )
        few, more = [await self._prompt_tokens(name, words) for words in (_FEW_WORDS, _MORE_WORDS)]
        if more <= few:
            raise BenchError(
                f"{self._origin.url} counts {few} and {more} prompt tokens for texts of very unlike length"
            )
        longest = found[name].get("max_model_len")
        return Served(name, int(longest) if longest else None, (more - few) / (_MORE_WORDS - _FEW_WORDS))

    async def _prompt_tokens(self, model: str, words: int) -> int:
        messages = [{"role": "user", "content": sample("calibration", words)}]
        reply = await self.whole(model, messages, answer_tokens=1)
        return int((reply.get("usage") or {}).get("prompt_tokens") or 0)
