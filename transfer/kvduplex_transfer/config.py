"""Turning a mapping from a file or a command line into typed options, with errors a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvduplex_transfer.errors import ConfigError

__all__ = ["parse_options"]

_Options = TypeVar("_Options", bound=BaseModel)


def parse_options(model: type[_Options], values: Mapping[str, Any], *, where: str) -> _Options:
    """Build `model` from `values`.

    Args:
        model: A pydantic model that forbids unknown keys.
        values: What was configured.
        where: Place it came from, for the message, e.g. ``recipe qwen3-32b, decode``.

    Raises:
        ConfigError: Every wrong key on a line of its own, each with the value seen and what is allowed.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        lines = [_line(model, details) for details in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from error


def _line(model: type[BaseModel], details: ErrorDetails) -> str:
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggestion(key, model)}"
    if details["type"] == "missing":
        return f"{key}: missing, and it has no default"
    message = details["msg"].removeprefix("Value error, ")
    if not key:
        return message
    return f"{key}: {message[0].lower()}{message[1:]}{_seen(details['input'])}"


def _seen(value: object) -> str:
    # Only scalars, and not at length: a list of flags or a mapping might carry a secret.
    return f", got {value!r:.80}" if isinstance(value, str | int | float | None) else ""


def _suggestion(key: str, model: type[BaseModel]) -> str:
    known = sorted(model.model_fields)
    close = difflib.get_close_matches(key, known, n=1)
    return f", did you mean {close[0]}?" if close else f"; known keys: {', '.join(known)}"
