"""Secret keys: read from Secrets Manager or a file, handed on, never logged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvduplex.node.aws import explained
from kvduplex.node.config import KeySource
from kvduplex.node.errors import SecretError
from kvduplex_transfer.strictyaml import parse_yaml

if TYPE_CHECKING:
    from types_boto3_secretsmanager import SecretsManagerClient

__all__ = ["client_key_entries", "read_secret", "single_key"]


def read_secret(source: KeySource, *, client: Callable[[], SecretsManagerClient]) -> str:
    """Text of a secret.

    Args:
        source: Where it lies.
        client: Makes a Secrets Manager client; called only when the source is a secret.

    Raises:
        SecretError: It cannot be read, or is empty.
    """
    where = source.secret or source.file or ""
    text = _from_file(Path(source.file)) if source.file else _from_manager(where, client())
    if not text.strip():
        raise SecretError(f"{where}: empty; put the keys into it, one a line")
    return text


def single_key(text: str, *, where: str) -> str:
    """The one key in `text`.

    Raises:
        SecretError: There is more than one, or it cannot travel in a header.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) != 1 or not lines[0].isascii() or not lines[0].isprintable() or " " in lines[0]:
        raise SecretError(f"{where}: must hold exactly one key of printable characters without spaces")
    return lines[0]


def client_key_entries(text: str, *, where: str) -> list[dict[str, Any]]:
    """Entries of the router's key file, with digests in place of keys.

    `text` is either lines of ``TENANT KEY`` or ``KEY``, or that YAML list itself.

    Raises:
        SecretError: It is neither.
    """
    try:
        values = parse_yaml(text)
    except yaml.YAMLError:
        values = None  # lines of keys need not be YAML
    if isinstance(values, list):
        return [_hashed(entry, where) for entry in values]
    return [_entry(line.split(), where) for line in text.splitlines() if line.strip()]


def _entry(words: list[str], where: str) -> dict[str, Any]:
    if len(words) > 2:  # noqa: PLR2004
        raise SecretError(f"{where}: a line holds {len(words)} words; write KEY, or TENANT KEY")
    *tenant, key = words
    return {"sha256": _digest(key), **({"tenant": tenant[0]} if tenant else {})}


def _hashed(entry: object, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or ("key" in entry) == ("sha256" in entry):
        raise SecretError(f"{where}: every entry of the list needs exactly one of key and sha256")
    rest = {name: value for name, value in entry.items() if name != "key"}
    return {"sha256": _digest(str(entry["key"])), **rest} if "key" in entry else rest


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _from_file(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretError(
            f"{path}: the key file cannot be read: {error}; it must be readable by user kvduplex"
        ) from error


def _from_manager(secret: str, client: SecretsManagerClient) -> str:
    remedy = "Check the name, and that the instance's role may call secretsmanager:GetSecretValue on it."
    with explained(f"reading secret {secret}", SecretError, remedy=remedy):
        text = client.get_secret_value(SecretId=secret).get("SecretString")
    if text is None:
        raise SecretError(f"secret {secret} is binary; store text")
    return _unwrapped(text)


def _unwrapped(text: str) -> str:
    """A secret made by `GenerateSecretString` with a template is a JSON object; its only value is the key."""
    try:
        values = json.loads(text)
    except ValueError:
        return text
    if isinstance(values, dict) and len(values) == 1:
        return str(next(iter(values.values())))
    return text
