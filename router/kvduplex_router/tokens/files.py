"""A served model's tokenizer and chat template, read from the files that the model came with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from kvduplex_router.errors import ConfigError
from kvduplex_router.tokens.template import ChatTemplate

__all__ = ["TokenizerFiles", "load_files"]

_SPECIALS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT: Final = "default"


class TokenizerFiles:
    """What was read.

    Attributes:
        tokenizer: A ``tokenizers.Tokenizer``.
        template: The chat template; None when the model has none.
        specials: Texts of its special tokens.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate | None, specials: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.specials = specials


def load_files(place: Path) -> TokenizerFiles:
    """Read ``tokenizer.json`` and the chat template beside it.

    Args:
        place: A model's folder, or its ``tokenizer.json``.

    Raises:
        ConfigError: A file is missing or cannot be used.
    """
    file = place / "tokenizer.json" if place.is_dir() else place
    if not file.is_file():
        raise ConfigError(f"tokenizer: {file} does not exist; give the served model's folder or its tokenizer.json")
    settings = _settings(file.with_name("tokenizer_config.json"))
    tokenizer = _tokenizer(file)
    specials = tuple(str(added.content) for added in tokenizer.get_added_tokens_decoder().values() if added.special)
    return TokenizerFiles(tokenizer, _template(file, settings), specials)


def _tokenizer(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - a vendor package, wanted only with a tokenizer
    except ImportError:
        raise ConfigError("tokenizer: needs the package 'tokenizers'; install kvduplex[router]") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        raise ConfigError(f"tokenizer: {file} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _settings(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"tokenizer: {file} cannot be read: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _template(file: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    source = _source(file, settings)
    if source is None:
        return None
    texts = {name: _text(settings.get(name)) for name in _SPECIALS}
    try:
        return ChatTemplate(source, {name: text for name, text in texts.items() if text is not None})
    except ValueError as error:
        raise ConfigError(f"tokenizer: {file.parent}: {error}") from None


def _source(file: Path, settings: Mapping[str, Any]) -> str | None:
    own = file.with_name("chat_template.jinja")
    if own.is_file():
        return own.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get(_DEFAULT)
    return template if isinstance(template, str) else None


def _text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
