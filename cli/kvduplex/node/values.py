"""Spellings of single values in a node file."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from kvduplex_router.config import StateConfig

__all__ = ["AbsolutePath", "EngineUrl", "Name", "Port", "Region", "S3Url", "SecretId", "StateUrl"]


def _absolute(value: str) -> str:
    if not PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
        raise ValueError("must be an absolute path without '..'")
    return value


def _engine_url(value: str) -> str:
    url = urlsplit(value)
    if url.scheme not in {"http", "https"} or not url.hostname or url.port is None:
        raise ValueError("must be http://HOST:PORT, for a decode engine also http://HOST:PORT#lease=HOST:PORT")
    if url.username or url.password or url.query:
        raise ValueError("must hold neither credentials nor a query")
    return value


def _state_url(value: str) -> str:
    try:
        StateConfig(url=value)
    except ValidationError as error:
        raise ValueError(error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")) from error
    return value


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,38}[a-z0-9]$")]
"""Cluster name: 2 to 40 lower-case letters, digits and hyphens; it becomes part of tags and resource names."""
Port = Annotated[int, Field(ge=1, le=65535)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
EngineUrl = Annotated[str, AfterValidator(_engine_url)]
StateUrl = Annotated[str, AfterValidator(_state_url)]
S3Url = Annotated[str, StringConstraints(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?$")]
Region = Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")]
SecretId = Annotated[
    str,
    StringConstraints(pattern=r"^(arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:)?[A-Za-z0-9/_+=.@-]{1,512}$"),
]
