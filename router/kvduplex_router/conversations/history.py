"""What a request's history is, as digests: does this request extend that earlier one?

A chat history is a chain: a digest over the scope (tenant, model, everything else that shapes the prompt), then one
message after the other, each as the bytes the client sent. A request that extends an earlier one has the earlier
chain's end among its own. A text prompt is the same with a single growing message.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from typing import Any, Final

import msgspec
import orjson

from kvduplex_router.conversations.keys import KEY_BYTES, scope_digest
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind

__all__ = ["ChatHistory", "Extension", "TextHistory", "history_of", "prompt_scope"]

_MESSAGES: Final = msgspec.json.Decoder(list[msgspec.Raw])
_CANDIDATES: Final = 8

SHAPING: Final = (
    "tools", "functions", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "documents", "reasoning_effort", "include_reasoning", "mm_processor_kwargs",
    "media_io_kwargs", "cache_salt", "truncate_prompt_tokens", "truncation_side", "suffix", "system",
)  # fmt: skip
"""Members besides the history that may change the rendered prompt or the KV it may share."""


def prompt_scope(tenant: str, kind: str, body: Body) -> bytes:
    """Digest of everything but the history that the prompt depends on."""
    shaping = [name.encode() + b"=" + body.raw(name) for name in SHAPING if name in body]
    if body.raw("tool_choice") == b'"none"':  # an engine may be set to leave the tools out then
        shaping.append(b"tool_choice=none")
    return scope_digest(b"scope", tenant.encode(), kind.encode(), body.raw("model"), *shaping)


class Extension(msgspec.Struct, frozen=True, array_like=True):
    """A possible end of an earlier request inside this one.

    Attributes:
        length: Messages, or characters, of the earlier request.
        digest: Chain digest there.
    """

    length: int
    digest: bytes


class ChatHistory:
    """A list of messages."""

    def __init__(self, scope: bytes, messages: list[msgspec.Raw], turn_marks: tuple[bytes, ...]) -> None:
        self._scope = scope
        self._turn_marks = turn_marks
        self._messages = messages

    @cached_property
    def _chain(self) -> tuple[Extension, list[Extension]]:
        wanted = set(self._boundaries())
        chain = blake2b(self._scope, digest_size=KEY_BYTES)
        found: list[Extension] = []
        for index, message in enumerate(self._messages):
            if index in wanted:
                found.append(Extension(index, chain.copy().digest()))
            chain.update(b"\0")
            chain.update(message)
        return Extension(len(self._messages), chain.digest()), found[::-1]

    @property
    def end(self) -> Extension:
        """This request itself, as a later one will look for it."""
        return self._chain[0]

    @property
    def earlier(self) -> list[Extension]:
        """Where an earlier request may have ended, the longest first: just before an assistant's message."""
        return self._chain[1]

    def at(self, length: int) -> bytes | None:
        """Chain digest after `length` messages; None when there are fewer."""
        if length > len(self._messages):
            return None
        chain = blake2b(self._scope, digest_size=KEY_BYTES)
        for message in self._messages[:length]:
            chain.update(b"\0")
            chain.update(message)
        return chain.digest()

    def answer_after(self, length: int) -> Any:
        """The decoded message that follows the first `length`; None when there is none."""
        if length >= len(self._messages):
            return None
        try:
            return orjson.loads(bytes(self._messages[length]))
        except orjson.JSONDecodeError:
            return None

    def _boundaries(self) -> list[int]:
        found: list[int] = []
        for index in range(len(self._messages) - 1, 0, -1):
            message = bytes(self._messages[index])
            if any(mark in message for mark in self._turn_marks):
                found.append(index)
                if len(found) == _CANDIDATES:
                    break
        return found


class TextHistory:
    """A prompt that is one string; recognised only with a conversation id, for its turns have no visible borders."""

    def __init__(self, scope: bytes, prompt: str) -> None:
        self._scope = scope
        self._prompt = prompt

    @property
    def end(self) -> Extension:
        """This request itself."""
        return Extension(len(self._prompt), self._digest(self._prompt))

    @property
    def earlier(self) -> list[Extension]:
        """Nothing: see the class."""
        return []

    def at(self, length: int) -> bytes | None:
        """Digest of the first `length` characters; None when there are fewer."""
        return None if length > len(self._prompt) else self._digest(self._prompt[:length])

    def answer_after(self, length: int) -> Any:
        """The text that follows."""
        return self._prompt[length:]

    def _digest(self, text: str) -> bytes:
        return scope_digest(self._scope, text.encode("utf-8", "surrogatepass"))


def history_of(tenant: str, kind: ApiKind, body: Body) -> ChatHistory | TextHistory | None:
    """The request's history; None when it has none that could be extended."""
    raw = body.raw(kind.history)
    scope = prompt_scope(tenant, kind.name, body)
    if raw.startswith(b"["):
        try:
            messages = _MESSAGES.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return None
        return (
            ChatHistory(scope, messages, kind.turn_marks) if messages and bytes(messages[0]).startswith(b"{") else None
        )
    text = body.text(kind.history) if raw.startswith(b'"') else None
    return None if text is None else TextHistory(scope, text)
