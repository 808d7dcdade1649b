"""A request body as its top-level members, each kept as the bytes the client sent.

One pass finds the members; nothing below them is decoded until someone asks. Bodies for engines are joined from the
same bytes, so numbers, escapes and key order below the top level reach an engine exactly as they were written. Of a
repeated key the last counts, as in every engine, and only that one is sent on.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import orjson

from kvduplex_router.errors import BadRequestError

__all__ = ["Body", "decode_members"]

_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL: Final = b"null"
_MARK: Final = codecs.BOM_UTF8
"""Some editors and clients begin with it; engines do not mind."""
_ESCAPE: Final = rb"(?<!\\)((?:\\\\)*\\u)"
_SURROGATE: Final = re.compile(_ESCAPE + rb"[dD]([89a-fA-F])")
_STAND_IN: Final = re.compile(_ESCAPE + rb"[eE]([0-7])")


class Body:
    """A parsed JSON object that remembers its bytes."""

    __slots__ = ("_decoded", "_members", "size")

    def __init__(self, members: Mapping[str, bytes | msgspec.Raw], size: int) -> None:
        self._members = members
        self._decoded: dict[str, Any] = {}
        self.size = size

    @classmethod
    def parse(cls, raw: bytes) -> Body:
        """Read a body.

        Raises:
            BadRequestError: It is not one JSON object.
        """
        return cls(decode_members(raw), len(raw))

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def raw(self, name: str) -> bytes:
        """The member's bytes; ``null`` when it is absent."""
        value = self._members.get(name)
        return _NULL if value is None else bytes(value)

    def get(self, name: str) -> Any:
        """The member's decoded value; None when it is absent.

        Raises:
            BadRequestError: The member holds something no engine could read either.
        """
        if name not in self._members:
            return None
        if name not in self._decoded:
            try:
                self._decoded[name] = orjson.loads(self.raw(name))
            except orjson.JSONDecodeError:
                raise BadRequestError(f"'{name}' is not valid JSON", param=name) from None
        return self._decoded[name]

    def text(self, name: str) -> str | None:
        """The member when it is a string, else None."""
        value = self.get(name)
        return value if isinstance(value, str) else None

    def render(self, *, without: Iterable[str] = (), extra: Mapping[str, bytes] | None = None) -> bytes:
        """The object as bytes, less the members in `without`, plus `extra` members whose values are JSON bytes."""
        extra = extra or {}
        parts: list[bytes | msgspec.Raw] = []
        for name, value in self._members.items():
            if name not in without and name not in extra:
                parts += (b",", _key(name), value)
        for name, value in extra.items():
            parts += (b",", _key(name), value)
        if not parts:
            return b"{}"
        parts[0] = b"{"
        parts.append(b"}")
        return b"".join(parts)


_KEYS: Final[dict[str, bytes]] = {}
_KEYS_KEPT: Final = 512
_KEY_KEPT_BYTES: Final = 64


def _key(name: str) -> bytes:
    """``"name":`` in JSON; the few names that recur are kept."""
    key = _KEYS.get(name)
    if key is None:
        key = orjson.dumps(name) + b":"
        if len(_KEYS) < _KEYS_KEPT and len(key) < _KEY_KEPT_BYTES:
            _KEYS[name] = key
    return key


def decode_members(raw: bytes) -> Mapping[str, bytes | msgspec.Raw]:
    """Members of a JSON object by decoded name.

    Raises:
        BadRequestError: `raw` is not one JSON object.
    """
    try:
        return _MEMBERS.decode(raw)
    except msgspec.ValidationError:
        raise BadRequestError("the request body must be a JSON object") from None
    except RecursionError:
        raise BadRequestError("the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if raw.startswith(_MARK) and not raw.startswith(_MARK, len(_MARK)):
            return decode_members(raw[len(_MARK) :])
        if b"\\ud" in raw or b"\\uD" in raw:
            return _with_surrogates(raw, error)
        raise _malformed(error) from None


def _malformed(error: Exception) -> BadRequestError:
    detail = str(error) if isinstance(error, msgspec.DecodeError) else "it is not UTF-8"
    return BadRequestError(f"the request body is not valid JSON: {detail}")


def _with_surrogates(raw: bytes, error: Exception) -> Mapping[str, bytes | msgspec.Raw]:
    """Members of a body with lone surrogate escapes, which Python's own JSON reader accepts and ours does not.

    For the pass every escape of the surrogate range stands in as one of the private range ``E000``-``E7FF``; a body
    that uses both is refused, for want of a way back.
    """
    if _STAND_IN.search(raw):
        raise _malformed(error) from None
    try:
        members = _MEMBERS.decode(_SURROGATE.sub(lambda m: m[1] + b"e%d" % (int(m[2], 16) - 8), raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _malformed(error) from None
    if any("\ue000" <= character <= "\ue7ff" for name in members for character in name):
        raise _malformed(error) from None
    return {name: _STAND_IN.sub(lambda m: m[1] + b"d%x" % (int(m[2]) + 8), bytes(v)) for name, v in members.items()}
