"""Where conversations are kept when several routers share them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, field_validator, model_validator

from kvduplex_router.config.sections import Seconds, Section

__all__ = ["StateConfig"]

_SCHEMES: Final = ("valkey", "valkeys", "redis", "rediss", "unix")


class StateConfig(Section):
    """A Valkey or Redis server that routers share; without a URL each router keeps conversations to itself.

    Attributes:
        url: ``valkey://HOST:PORT/DB``, ``valkeys://`` with TLS, ``unix:///PATH``; ``redis://`` and ``rediss://`` mean
            the same. A user may stand in it, a password may not.
        password_env: Environment variable with the password.
        ca_file: Certificates the server is checked against; the system's when not given.
        namespace: Routers share with those of the same namespace; part of every key.
        timeout_s: What a turn waits for the server at most.
        retry_s: Between attempts to reach a server that failed; turns do not wait for it meanwhile.
    """

    url: str | None = None
    password_env: str | None = None
    ca_file: Path | None = None
    namespace: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    timeout_s: Annotated[float, Field(ge=0.005, le=5)] = 0.1
    retry_s: Seconds = 1.0

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        return None if value is None else _checked(value)

    @model_validator(mode="after")
    def _nothing_without_url(self) -> Self:
        if self.url is None and self.password_env is not None:
            raise ValueError("password_env is given without url; write url: valkey://HOST:PORT/DB")
        return self


def _checked(value: str) -> str:
    """The URL as the client library spells it.

    Raises:
        ValueError: It is something else, or a password is in it.
    """
    form = "write valkey://HOST:PORT/DB, valkeys://HOST:PORT/DB or unix:///PATH?db=DB"
    scheme, _, rest = value.partition("://")
    if scheme not in _SCHEMES or not rest:
        raise ValueError(f"'{scheme}://…' is not a state URL; {form}")
    parts = urlsplit(value)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.password is not None or any(name == "password" for name, _ in parse_qsl(parts.query)):
        raise ValueError("the URL holds a password; put it into an environment variable and name that in password_env")
    if scheme == "unix":
        _check_unix(parts.path, parts.query, form)
    elif not parts.hostname or port == 0 or parts.query or not _is_database(parts.path):
        raise ValueError(f"'{value}' is not a state URL; {form}")
    return f"{scheme.replace('redis', 'valkey')}://{rest}"


def _check_unix(path: str, query: str, form: str) -> None:
    if len(path) <= 1 or any(name != "db" or not db.isdigit() for name, db in parse_qsl(query)):
        raise ValueError(f"'unix://{path}' is not a state URL; {form}")


def _is_database(path: str) -> bool:
    return path in ("", "/") or path.removeprefix("/").isdigit()
