"""Who is calling: API keys, their tenants and their rates.

Only digests of keys are held. A presented key is digested before anything is compared, so the time a comparison takes
says nothing about any key.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvduplex_router.clock import Clock
from kvduplex_router.config import AuthConfig
from kvduplex_router.errors import AuthenticationError, ConfigError, RateLimitedError

__all__ = ["Authenticator", "Principal", "env_secret", "load_authenticator"]

_TENANT_HEX: Final = 16
_BEARER: Final = b"bearer "
_ABSENT: Final = b"\0" * 32


class KeyEntry(BaseModel):
    """One key in the keys file.

    Attributes:
        key: The key itself; or
        sha256: its SHA-256 in hex, which keeps it out of the file.
        tenant: Whose it is: conversations are never shared between tenants. Keys without one are tenants of their own.
        requests_per_minute: Its rate; 0 is no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str | None = Field(default=None, min_length=8)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    tenant: str = ""
    requests_per_minute: float = Field(default=0, ge=0, le=1_000_000_000)

    @field_validator("requests_per_minute", mode="before")
    @classmethod
    def _a_number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("a number is expected here")  # noqa: TRY004 - what pydantic reports
        return value

    @model_validator(mode="after")
    def _one_of_them(self) -> KeyEntry:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return self

    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return bytes.fromhex(self.sha256) if self.sha256 is not None else sha256((self.key or "").encode()).digest()


@dataclass(slots=True)
class _Bucket:
    """Tokens that grow with time up to a minute's worth."""

    per_minute: float
    tokens: float
    at: float

    def take(self, now: float) -> float:
        """Take one token; returns 0.0, or the seconds until there is one."""
        self.tokens = min(max(self.per_minute, 1.0), self.tokens + (now - self.at) * self.per_minute / 60)
        self.at = now
        if self.tokens >= 1:
            self.tokens -= 1
            return 0.0
        return (1 - self.tokens) * 60 / self.per_minute


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        tenant: Scope of its conversations.
        digest: Of its key.
        bucket: Its rate, when it has one.
    """

    tenant: str
    digest: bytes = b""
    bucket: _Bucket | None = None


_ANYONE: Final = Principal("")


class Authenticator:
    """Checks API keys; without any configured, everyone is the same caller.

    Args:
        entries: The keys.
        clock: Monotonic seconds.
        workers: Processes that share the keys' rates; each grants its part.
    """

    def __init__(self, entries: Iterable[KeyEntry], *, clock: Clock, workers: int = 1) -> None:
        self._clock = clock
        self._workers = workers
        self._principals = {entry.digest(): self._principal(entry) for entry in entries}

    @property
    def enabled(self) -> bool:
        """Whether keys are asked for."""
        return bool(self._principals)

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Principal:
        """The caller behind a request's headers.

        Raises:
            AuthenticationError: There is no key, or it is not known.
            RateLimitedError: The key's rate is used up.
        """
        if not self._principals:
            return _ANYONE
        presented = _presented_key(headers)
        if presented is None:
            raise AuthenticationError("no API key; send 'Authorization: Bearer KEY'")
        digest = sha256(presented).digest()
        found = self._principals.get(digest)
        if not hmac.compare_digest(_ABSENT if found is None else found.digest, digest) or found is None:
            raise AuthenticationError("the API key is not known here")
        if found.bucket is not None and (wait_s := found.bucket.take(self._clock())) > 0:
            raise RateLimitedError("the API key's rate is used up", retry_after_s=int(wait_s) + 1)
        return found

    def _principal(self, entry: KeyEntry) -> Principal:
        rate = entry.requests_per_minute / self._workers
        bucket = _Bucket(rate, max(rate, 1.0), self._clock()) if rate else None
        digest = entry.digest()
        return Principal(entry.tenant or f"key:{digest.hex()[:_TENANT_HEX]}", digest, bucket)


def _presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    given = headers.get(b"authorization", b"").strip()
    if given[: len(_BEARER)].lower() == _BEARER:
        return given[len(_BEARER) :].strip() or None
    return headers.get(b"x-api-key", b"").strip() or None


def load_authenticator(
    config: AuthConfig, *, clock: Clock, workers: int = 1, environ: Mapping[str, str] = os.environ
) -> Authenticator:
    """Read the configured keys.

    Raises:
        ConfigError: A file or variable that is named does not hold usable keys.
    """
    entries: list[KeyEntry] = []
    if config.keys_file is not None:
        entries += _from_file(config.keys_file)
    if config.keys_env is not None:
        found = [key.strip() for key in env_secret("auth.keys_env", config.keys_env, environ).split(",")]
        entries += [_entry(f"environment variable {config.keys_env}", {"key": key}) for key in found if key]
        if not any(found):  # no key at all would let everybody in
            raise ConfigError(f"auth.keys_env: environment variable {config.keys_env} holds commas and no key")
    _refuse_repeated(entries)
    return Authenticator(entries, clock=clock, workers=workers)


def _refuse_repeated(entries: Sequence[KeyEntry]) -> None:
    """A key of two entries would belong to the tenant that happens to come last."""
    numbers: dict[bytes, int] = {}
    for number, entry in enumerate(entries, 1):
        if (first := numbers.setdefault(entry.digest(), number)) != number:
            raise ConfigError(f"auth: keys {first} and {number} are the same; every key is listed once")


def env_secret(key: str, name: str, environ: Mapping[str, str] = os.environ) -> str:
    """A secret that configuration key `key` expects in environment variable `name`.

    Raises:
        ConfigError: It is not set.
    """
    value = environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"{key}: environment variable {name} is empty or not set")
    return value


def _from_file(path: Path) -> list[KeyEntry]:
    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"auth.keys_file: {path} cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"auth.keys_file: {path} is not valid YAML") from None  # its message could show a key
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"auth.keys_file: {path} must be a list of keys with at least one entry")
    return [_entry(f"{path}, entry {number}", value) for number, value in enumerate(listed, 1)]


def _entry(place: str, value: Any) -> KeyEntry:
    try:
        return KeyEntry.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"auth: {place}: {where}{': ' if where else ''}{first['msg']}") from None
