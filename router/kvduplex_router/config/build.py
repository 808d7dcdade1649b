"""Makes a configuration out of a file and flags, and explains what is wrong with it in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from kvduplex_router.config.document import ConfigDocument
from kvduplex_router.config.router import RouterConfig
from kvduplex_router.errors import ConfigError

__all__ = ["build_config"]


_SECTION_FLAGS: Final = {
    "decoder_kv_blocks_ttl_s": ("conversations", "decoder_kv_blocks_ttl_s"),
    "state_url": ("state", "url"),
    "otlp_endpoint": ("telemetry", "otlp_endpoint"),
    "policy": ("routing", "policy"),
    "tokenizer": ("routing", "tokenizer"),
    "engines_file": ("discovery", "file"),
    "engines_dns": ("discovery", "dns"),
    "engines_ec2": ("discovery", "ec2"),
}
"""Flags that set one key of a section and leave the file's others."""


def build_config(file: Path | None = None, /, **flags: Any) -> RouterConfig:
    """Merge a YAML file with flags; a flag that is None or empty leaves the file's value.

    Args:
        file: YAML file, or None.
        **flags: Keys of `RouterConfig`, and of `_SECTION_FLAGS`.

    Raises:
        ConfigError: The file cannot be read, or the result is not valid.
    """
    document = ConfigDocument.empty() if file is None else ConfigDocument.load(file)
    given = {key: value for key, value in flags.items() if value not in (None, (), [])}
    places: set[tuple[str, ...]] = {_SECTION_FLAGS.get(flag, (flag,)) for flag in given}
    for flag, (section, key) in _SECTION_FLAGS.items():
        if flag in given:
            value, written = given.pop(flag), given.get(section) or document.values.get(section) or {}
            given[section] = {**written, key: value} if isinstance(written, dict) else written
    try:
        return RouterConfig.model_validate({**document.values, **given})
    except ValidationError as error:
        raise ConfigError(_explain(error, document, places)) from None


def _explain(error: ValidationError, document: ConfigDocument, flags: set[tuple[str, ...]]) -> str:
    """One line; `flags` are the places that were given as flags, which no line of the file can be named for."""
    first = error.errors(include_url=False)[0]
    location = tuple(part for part in first["loc"] if not str(part).startswith("function-"))
    key = ".".join(str(part) for part in location)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"unknown key; allowed here: {', '.join(_allowed(location))}"
    elif not first["type"].startswith("value_error"):
        message = f"{message}, got {str(first['input'])[:80]!r}"
    if not location:
        key, _, message = message.partition(": ") if ": " in message else ("configuration", "", message)
        location = (key,)
    flagged = any(tuple(map(str, location[:length])) in flags for length in (1, 2))
    place = "" if flagged else document.place(location)
    return f"{place}{key}: {message}"


def _allowed(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = RouterConfig
    for part in location[:-1]:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return sorted(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation is or contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner)) is not None), None)
