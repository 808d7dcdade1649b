"""The lease shapes that travel inside ``kv_transfer_params``, written by the router and read by the engines.

The router names a lease before the decode engine has produced a token, so a lease depends on nothing that the response
stream carries: an aborted or streamed answer loses none. Two shapes exist:

* `Retention` goes to the decode engine: keep this request's blocks under a lease, or keep nothing.
* `ClaimOffer` goes to the prefill engine on the next turn: that lease may hold KV of this prompt; claim it there.

Values come from the network, so the constructors validate and `parse` never trusts a type.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from kvduplex_transfer.leases.errors import InvalidLeaseError

__all__ = [
    "CLAIM_KEY",
    "LEASE_ID_MAX_LENGTH",
    "MAX_TTL_S",
    "RETENTION_KEY",
    "ClaimOffer",
    "Retention",
    "check_endpoint",
    "check_lease_id",
    "check_ttl_s",
    "new_lease_id",
    "prefill_params",
]

RETENTION_KEY: Final = "lease"
"""Key of `Retention` in the decode engine's ``kv_transfer_params``."""

CLAIM_KEY: Final = "lease_claim"
"""Key of `ClaimOffer` in the prefill engine's ``kv_transfer_params``."""

LEASE_ID_MAX_LENGTH: Final = 128
"""Characters of the longest lease id."""

MAX_TTL_S: Final = 86_400.0
"""Longest duration any lease message may carry, in seconds."""

_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_HOST: Final = r"(?:\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._\-]+)?\]|[A-Za-z0-9._\-]+)"
_ENDPOINT: Final = re.compile(rf"tcp://({_HOST}):([0-9]{{1,5}})")
_SHOWN: Final = 60
_MAX_PORT: Final = 65_535


def new_lease_id() -> str:
    """A fresh lease id of 128 random bits, so that no tenant can guess another's."""
    return secrets.token_hex(16)


def check_lease_id(value: object) -> str:
    """Return `value` when it is a lease id: 1 to 128 of ``A-Z a-z 0-9 . _ : -``.

    Raises:
        InvalidLeaseError: It is not.
    """
    if isinstance(value, str) and _ID.fullmatch(value):
        return value
    raise InvalidLeaseError(f"lease id {_shown(value)}: expected 1 to {LEASE_ID_MAX_LENGTH} of A-Z a-z 0-9 . _ : -")


def check_ttl_s(value: object) -> float:
    """Return `value` in seconds when it is a duration of more than 0 and at most `MAX_TTL_S`.

    Raises:
        InvalidLeaseError: It is not.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        seconds = float(value)
        if 0.0 < seconds <= MAX_TTL_S:
            return seconds
    raise InvalidLeaseError(f"lease ttl_s {_shown(value)}: expected seconds above 0 and at most {MAX_TTL_S:.0f}")


def check_endpoint(value: object) -> str:
    """Return `value` when it is ``tcp://HOST:PORT`` (IPv6 hosts in brackets, port 1 to 65535).

    Raises:
        InvalidLeaseError: It is not.
    """
    match = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if match and 1 <= int(match[2]) <= _MAX_PORT:
        return match[0]
    raise InvalidLeaseError(f"lease endpoint {_shown(value)}: expected tcp://HOST:PORT with a port of 1 to 65535")


@dataclass(frozen=True, slots=True)
class Retention:
    """What the decode engine is to do with a request's blocks when the request ends.

    Attributes:
        id: Lease to keep them under; None keeps nothing, so that a request nobody will continue pins no memory.
        ttl_s: Seconds the lease lives after the request ended or after its last renewal; None leaves it to the engine.
    """

    id: str | None = None
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if self.id is not None:
            check_lease_id(self.id)
        if self.ttl_s is not None:
            check_ttl_s(self.ttl_s)

    @classmethod
    def none(cls) -> Self:
        """Keep nothing."""
        return cls()

    def to_params(self) -> dict[str, Any]:
        """The entry to merge into the decode engine's ``kv_transfer_params``."""
        if self.id is None:
            return {RETENTION_KEY: {"retain": False}}
        ttl = {} if self.ttl_s is None else {"ttl_s": self.ttl_s}
        return {RETENTION_KEY: {"id": self.id, **ttl}}

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> Self | None:
        """Read the entry out of ``kv_transfer_params``; None when there is none.

        Raises:
            InvalidLeaseError: The entry is malformed.
        """
        entry = _entry(params, RETENTION_KEY)
        if entry is None:
            return None
        if entry.get("retain") is False:
            return cls.none()
        ttl_s = entry.get("ttl_s")
        return cls(id=check_lease_id(entry.get("id")), ttl_s=None if ttl_s is None else check_ttl_s(ttl_s))


@dataclass(frozen=True, slots=True)
class ClaimOffer:
    """Where the prefill engine may claim KV for its prompt.

    Attributes:
        id: Lease that held the conversation's last turn.
        endpoint: The decode engine's lease endpoint, ``tcp://HOST:PORT``, from the router's own configuration.
    """

    id: str
    endpoint: str

    def __post_init__(self) -> None:
        check_lease_id(self.id)
        check_endpoint(self.endpoint)

    def to_params(self) -> dict[str, Any]:
        """The prefill engine's ``kv_transfer_params``, complete."""
        return {**prefill_params(), CLAIM_KEY: {"id": self.id, "endpoint": self.endpoint}}

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> Self | None:
        """Read the entry out of ``kv_transfer_params``; None when there is none.

        Raises:
            InvalidLeaseError: The entry is malformed.
        """
        entry = _entry(params, CLAIM_KEY)
        if entry is None:
            return None
        return cls(id=check_lease_id(entry.get("id")), endpoint=check_endpoint(entry.get("endpoint")))


def prefill_params() -> dict[str, Any]:
    """The prefill engine's ``kv_transfer_params`` of a turn without a claim."""
    return {"do_remote_decode": True, "do_remote_prefill": False}


def _entry(params: Mapping[str, Any] | None, key: str) -> Mapping[str, Any] | None:
    entry = (params or {}).get(key)
    if entry is None or isinstance(entry, Mapping):
        return entry
    raise InvalidLeaseError(f"kv_transfer_params[{key!r}] is {_shown(entry)}: expected an object")


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
