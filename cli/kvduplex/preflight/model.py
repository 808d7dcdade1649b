"""Whether a model folder holds what an engine needs, told before an engine spends a minute to find out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvduplex_transfer.hostchecks.findings import fail, shorten
from kvduplex_transfer.interface import Finding

__all__ = ["is_local", "max_tokens", "model_findings", "weight_bytes"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "spiece.model")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_LFS_POINTER = b"version https://git-lfs"
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def is_local(model: str) -> bool:
    """Whether `model` means a folder: it is one, or is spelled like a path."""
    return model.startswith(("/", ".", "~")) or _is_folder(model)


def model_findings(model: str) -> list[Finding]:
    """What keeps `model` from being served; empty when nothing does, and for hub ids, which the engine resolves."""
    if not is_local(model):
        return [] if _HUB_ID.fullmatch(model) else [_unknown(model)]
    try:
        folder = Path(model).expanduser()
        if not folder.is_dir():
            return [_unknown(model)]
        return [*_config_findings(folder), *_weight_findings(folder), *_tokenizer_findings(folder)]
    except RuntimeError:
        return [_unknown(model)]  # `~` of a user whom this machine does not know
    except OSError as error:
        return [_unreadable(model, error)]


def max_tokens(folder: Path) -> int | None:
    """The longest context that a folder's configuration names; None when it names none."""
    config = _config(folder)
    values = [section.get("max_position_embeddings") for section in (config, config.get("text_config") or {})]
    return next((value for value in values if isinstance(value, int)), None)


def weight_bytes(folder: Path, dtype: str) -> int:
    """Size of a folder's weights once an engine has converted them to `dtype`."""
    stored = sum(path.stat().st_size for path in _weight_files(folder))
    config = _config(folder)
    from_bytes = _ELEMENT_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")))
    to_bytes = _ELEMENT_BYTES.get(dtype)
    return stored * to_bytes // from_bytes if from_bytes and to_bytes else stored


def _unknown(model: str) -> Finding:
    return _unusable(
        "model.folder",
        f"--model {model}: no such folder, and not a hub id",
        "a folder with config.json, weights and tokenizer, or ORGANISATION/NAME",
        fix="check the spelling; without --model a small random model is generated",
    )


def _unreadable(model: str, error: OSError) -> Finding:
    return _unusable(
        "model.folder",
        f"--model {model}: {error.strerror} ({error.filename})",
        "a folder whose files this user can read",
        fix="let this user read every file of the folder, and enter the folders above it; or give another folder",
    )


def _is_folder(model: str) -> bool:
    try:
        return Path(model).is_dir()
    except OSError:
        return False


def _config_findings(folder: Path) -> Iterator[Finding]:
    path = folder / "config.json"
    if not path.is_file():
        yield _lacks(folder, "config.json", "the model's config.json")
    elif not _config(folder).get("architectures"):
        yield _unusable(
            "model.config",
            f"{path} names no architectures",
            'a JSON object with "architectures"',
            fix="copy the model's config.json anew",
        )


def _weight_findings(folder: Path) -> Iterator[Finding]:
    files = _weight_files(folder)
    if not files:
        yield _lacks(folder, "weights", " or ".join(_WEIGHTS))
    pointers = [path.name for path in files if _starts_with(path, _LFS_POINTER)]
    if pointers:
        yield _unusable(
            "model.weights",
            f"{shorten(pointers)} in {folder}: Git LFS pointers, not weights",
            "the files themselves",
            fix=f"cd {folder} && git lfs pull",
        )
    missing = sorted(_indexed_files(folder) - {path.name for path in folder.iterdir()})
    if missing:
        yield _unusable(
            "model.weights",
            f"{shorten(missing)} of model.safetensors.index.json missing in {folder}",
            "every file that the index names",
            fix="copy or download the missing files",
        )
    yield from (_cut_short(path) for path in files if path.name not in pointers and _is_cut_short(path))


def _tokenizer_findings(folder: Path) -> Iterator[Finding]:
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        yield _lacks(folder, "tokenizer", " or ".join(_TOKENIZERS))


def _lacks(folder: Path, what: str, expected: str) -> Finding:
    return _unusable(
        f"model.{what.partition('.')[0]}",
        f"{folder} has no {what}",
        expected,
        fix="give the folder that `hf download` or `save_pretrained` wrote, not one above or below it",
    )


def _unusable(check: str, seen: str, expected: str, *, fix: str) -> Finding:
    return fail(check, seen, expected, why="an engine would find out only after loading for a minute", fix=fix)


def _cut_short(path: Path) -> Finding:
    return _unusable(
        "model.weights",
        f"{path} ends before its tensors do",
        "a complete safetensors file",
        fix="copy or download it again",
    )


def _weight_files(folder: Path) -> list[Path]:
    """Files of the first format that is there, which is the one engines choose."""
    found = (sorted(folder.glob(pattern)) for pattern in _WEIGHTS)
    return next((files for files in found if files), [])


def _is_cut_short(path: Path) -> bool:
    """Whether a safetensors file is shorter than its header says."""
    if path.suffix != ".safetensors":
        return False
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        header = _json_object(file.read(length)) if length <= size else {}
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return not header or size < 8 + length + max(ends, default=0)


def _indexed_files(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    weight_map = _json_object(index.read_bytes()).get("weight_map") if index.is_file() else None
    return set(weight_map.values()) if isinstance(weight_map, dict) else set()


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return _json_object(path.read_bytes()) if path.is_file() else {}


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _starts_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start
