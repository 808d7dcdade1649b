"""Writes the safetensors format: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.

The library's writer is not used because the order and padding it chooses may change between releases, and the file's
checksum is pinned. Format: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["write_tensors"]

_FLOAT32 = np.dtype("<f4")


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, NDArray[np.float32]]]
) -> None:
    """Write float32 tensors one at a time, so that memory never holds more than one.

    Args:
        path: File to create.
        shapes: Every tensor's shape by name, in file order.
        tensors: The same tensors in the same order.

    Raises:
        ValueError: `tensors` does not match `shapes`.
    """
    with path.open("wb") as file:
        header = _header(shapes)
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for (expected, shape), (name, tensor) in zip(shapes.items(), tensors, strict=True):
            if (name, tensor.shape) != (expected, shape):
                raise ValueError(f"tensor {name} {tensor.shape}, expected {expected} {shape}")
            file.write(tensor.astype(_FLOAT32, copy=False).tobytes())


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * _FLOAT32.itemsize
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)  # tensors start aligned, as memory-mapping readers want
