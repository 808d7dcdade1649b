"""Makes `Prompt`s out of requests: exactly where the served model's tokenizer is at hand, by estimate where not."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypedDict

import numpy as np

from kvduplex_router.errors import BadRequestError
from kvduplex_router.events.hashing import TOKEN_BYTES, token_bytes
from kvduplex_router.requests.apis import CHAT, COMPLETIONS
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind
from kvduplex_router.tokens.errors import NotRenderableError
from kvduplex_router.tokens.files import TokenizerFiles
from kvduplex_router.tokens.messages import Chat, chat_of
from kvduplex_router.tokens.prefixes import PrefixTokens, Segments
from kvduplex_router.tokens.prompt import Prompt, TokenSource

__all__ = ["PLACES", "Tokeniser"]

_log = logging.getLogger("kvduplex.router.tokens")

PLACES: Final = ("system", "few_shot", "previous_turn")
"""Places in a prompt that have a name: the end of the system prompt; of everything before the last message; of the
last answer."""

_ASIDE_CHARACTERS: Final = 8_000
_CHECK_EVERY: Final = 1_024
_CHECK_CHARACTERS: Final = 64_000
_SCOPE: Final = ("tools", "system", "chat_template_kwargs", "instructions", "model")
_PROBE: Final[tuple[dict[str, Any], ...]] = (
    {"role": "user", "content": " One  two\n\nthree"},
    {"role": "assistant", "content": "\tFour, five. "},
    {"role": "user", "content": "\nsix 7 ééé 八"},
)


class _Naming(TypedDict):
    model: str
    salt: str | None


class Tokeniser:
    """See the module.

    Args:
        files: The served model's; None estimates everything.
        cache_bytes: Bound on what is kept of earlier prompts.

    Attributes:
        counts: Prompts by source.
        failures: Prompts that had to be estimated although there is a tokenizer, by reason.
    """

    def __init__(self, files: TokenizerFiles | None, *, cache_bytes: int = 256 * 1024 * 1024) -> None:
        self._files = files
        self._prefixes = PrefixTokens(max_bytes=cache_bytes)
        self._end = "" if files is None else self._turn_end(files)
        self._end_id = files.tokenizer.token_to_id(self._end) if files is not None and self._end else -1
        self._checks = 0
        self.counts: Counter[TokenSource] = Counter()
        self.failures: Counter[str] = Counter()

    @property
    def exact(self) -> bool:
        """Whether there is a tokenizer."""
        return self._files is not None

    @property
    def cached(self) -> PrefixTokens:
        """Tokens of earlier prompts."""
        return self._prefixes

    async def prompt(self, kind: ApiKind, body: Body) -> Prompt:
        """The request's prompt."""
        prompt = await self._made(kind, body)
        self.counts[prompt.source] += 1
        return prompt

    async def _made(self, kind: ApiKind, body: Body) -> Prompt:
        try:
            if kind is COMPLETIONS and isinstance(ids := body.get("prompt"), list):
                return self._given(ids, body)
            if self._files is not None:
                return await self._exact(kind, body)
        except NotRenderableError as error:
            self.failures[error.reason] += 1
        except BadRequestError:  # JSON that only a lenient reader takes, such as lone surrogates
            self.failures["shape"] += 1
        return _estimate(kind, body)

    @staticmethod
    def _given(ids: Sequence[Any], body: Body) -> Prompt:
        try:
            tokens = token_bytes(ids)
        except (TypeError, OverflowError):
            raise NotRenderableError("shape") from None
        return Prompt(tokens, source=TokenSource.GIVEN, model=body.text("model") or "", salt=body.text("cache_salt"))

    async def _exact(self, kind: ApiKind, body: Body) -> Prompt:
        assert self._files is not None  # noqa: S101 - the caller asked
        naming: _Naming = {"model": body.text("model") or "", "salt": body.text("cache_salt")}
        if kind is COMPLETIONS:
            text = body.text("prompt")
            if text is None:
                raise NotRenderableError("shape")
            plain = body.get("add_special_tokens")
            tokens = await self._encoded(text, special=plain is None or bool(plain))
            return Prompt(tokens, source=TokenSource.TOKENIZER, **naming)
        if kind is not CHAT or self._files.template is None:
            raise NotRenderableError("api")
        chat = chat_of(body, parts=self._files.template.takes_parts)
        text = self._render(chat, chat.messages, generation_prompt=chat.generation_prompt)
        if chat.special_tokens or not self._end:
            return Prompt(
                await self._encoded(text, special=chat.special_tokens), source=TokenSource.TOKENIZER, **naming
            )
        return await self._grown(chat, text, naming)

    async def _grown(self, chat: Chat, text: str, naming: _Naming) -> Prompt:
        segments = Segments(text, self._end)
        pieces = len(segments.keys)
        count, known = self._prefixes.longest(segments)
        tokens = b"" if known is None else known.tokens
        start = segments.ends[count - 1] if count else 0
        if count == 0 and pieces > 1:  # the first piece is kept apart: other conversations begin with it too
            tokens = await self._encoded(text[: segments.ends[0]])
            known = self._prefixes.keep(segments, 1, tokens, after=0)
            count, start = 1, segments.ends[0]
        learned = known
        if count < pieces:
            end = segments.ends[-1]
            tokens += await self._encoded(text[start:end])
            learned = self._prefixes.keep(segments, pieces, tokens, after=count)
            start = end
        tokens += await self._encoded(text[start:])
        self._check(text, tokens)
        return Prompt(
            tokens, source=TokenSource.TOKENIZER, known=known, learned=learned if learned is not known else None,
            boundary=partial(self._boundary, chat, text, tokens), **naming,
        )  # fmt: skip

    def _render(self, chat: Chat, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool) -> str:
        assert self._files is not None  # noqa: S101
        assert self._files.template is not None  # noqa: S101 - asked before
        return self._files.template.render(
            messages, tools=chat.tools, generation_prompt=generation_prompt, arguments=chat.arguments
        )

    def _boundary(self, chat: Chat, text: str, tokens: bytes, place: str) -> int | None:
        """Tokens up to a named place, rounded down to a whole message."""
        leading = _messages_before(place, [str(message["role"]) for message in chat.messages])
        if not leading:
            return 0
        ends = np.nonzero(np.frombuffer(tokens, np.uint32) == self._end_id)[0]
        more = len(ends) - len(chat.messages)  # that the template puts in front
        if more >= 0:
            return int(ends[leading + more - 1]) + 1
        try:
            beginning = self._render(chat, chat.messages[:leading], generation_prompt=False)
        except NotRenderableError:
            return None
        if not text.startswith(beginning):
            return None
        whole = beginning.count(self._end)
        return int(ends[whole - 1]) + 1 if 0 < whole <= len(ends) else None

    async def _encoded(self, text: str, *, special: bool = False) -> bytes:
        """Token ids of a text; of a long one in another thread, for the library lets go of the interpreter."""
        if not text:
            return b""
        if len(text) < _ASIDE_CHARACTERS:
            return self._encode(text, special=special)
        return await asyncio.to_thread(self._encode, text, special=special)

    def _encode(self, text: str, *, special: bool = False) -> bytes:
        assert self._files is not None  # noqa: S101
        try:
            return token_bytes(self._files.tokenizer.encode(text, add_special_tokens=special).ids)
        except Exception:  # noqa: BLE001 - the library raises Exception itself, on lone surrogates for one
            raise NotRenderableError("content") from None

    def _check(self, text: str, tokens: bytes) -> None:
        """Now and then compare with the whole text tokenised at once; they were equal when this was begun."""
        self._checks += 1
        if self._checks % _CHECK_EVERY or len(text) > _CHECK_CHARACTERS:
            return
        if self._encode(text) != tokens:
            _log.error("the tokenizer cuts text across its special token; beginnings of prompts are no longer reused")
            self._end = ""

    def _turn_end(self, files: TokenizerFiles) -> str:
        """The special token behind every message; empty when there is none that texts can be cut at."""
        if files.template is None:
            return ""
        try:
            probe = [_listed(m) for m in _PROBE] if files.template.takes_parts else _PROBE
            text = files.template.render(probe)
        except NotRenderableError:
            return ""
        often = [special for special in files.specials if text.count(special) >= len(_PROBE) - 1]
        for end in sorted(often, key=text.find, reverse=True):  # what comes first after a message ends it
            cut = [piece + end for piece in text.split(end)]
            cut[-1] = cut[-1].removesuffix(end)
            pieces = [files.tokenizer.encode(piece, add_special_tokens=False).ids for piece in cut if piece]
            if [*chain.from_iterable(pieces)] == files.tokenizer.encode(text, add_special_tokens=False).ids:
                return end
        _log.warning("the tokenizer has no special token behind every message; prompts are tokenised whole each turn")
        return ""


def _listed(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _messages_before(place: str, roles: Sequence[str]) -> int:
    """How many leading messages end at a named place."""
    if place == "system":
        return next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    if place == "previous_turn":
        return max((i + 1 for i, role in enumerate(roles) if role == "assistant"), default=0)
    return len(roles) - 1


def _estimate(kind: ApiKind, body: Body) -> Prompt:
    """The bytes of the history in the place of tokens: good for prompts that begin alike, never for engines' events."""
    scope = hash(tuple(body.raw(name) for name in _SCOPE)) & (1 << 64) - 1
    raw = body.raw(kind.history).rstrip(b'"] \n\r\t')
    raw = scope.to_bytes(8, "little") + raw + b" " * (-len(raw) % TOKEN_BYTES)
    return Prompt(raw, source=TokenSource.ESTIMATE, model=body.text("model") or "", salt=body.text("cache_salt"))
