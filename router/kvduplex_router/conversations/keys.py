"""Keys of conversations: fixed-size digests scoped by tenant and model, so that no client can name another's."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from kvduplex_router.errors import BadRequestError

__all__ = ["KEY_BYTES", "checked_conversation_id", "id_key", "scope_digest"]

KEY_BYTES: Final = 16
_ID_MAX: Final = 256


def checked_conversation_id(value: object, *, place: str) -> str | None:
    """Return a conversation id, or None for none.

    Args:
        value: What the client sent.
        place: Where, for the message.

    Raises:
        BadRequestError: It is not a string of 1 to 256 printable characters.
    """
    if value is None:
        return None
    if isinstance(value, str) and 0 < len(value) <= _ID_MAX and value.isprintable():
        return value
    raise BadRequestError(f"{place} must be a string of 1 to {_ID_MAX} printable characters", param="conversation_id")


def id_key(tenant: str, model: str, conversation_id: str) -> bytes:
    """Key of a conversation that the client named."""
    return scope_digest(b"id", tenant.encode(), model.encode(), conversation_id.encode("utf-8", "surrogatepass"))


def scope_digest(*parts: bytes) -> bytes:
    """Digest over parts that cannot run into each other."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
