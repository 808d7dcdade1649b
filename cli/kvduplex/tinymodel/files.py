"""All files of a generated model, written to a folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvduplex.tinymodel.sizes import ModelSize
from kvduplex.tinymodel.tensorfile import write_tensors
from kvduplex.tinymodel.tokenizer import Vocabulary, tokenizer_files, vocabulary
from kvduplex.tinymodel.weights import tensor_shapes, tensors

__all__ = ["sha256_of", "write_model"]


def write_model(folder: Path, size: ModelSize) -> None:
    """Write configuration, tokenizer and weights of `size` into an existing, empty folder.

    Raises:
        OSError: The folder cannot be written or the disk is full.
    """
    vocab = vocabulary()
    for name, content in _small_files(size, vocab).items():
        (folder / name).write_bytes(content)
    shapes = tensor_shapes(size, vocab.size)
    write_tensors(folder / "model.safetensors", shapes, tensors(shapes, vocab, seed=size.folder))


def sha256_of(path: Path) -> str:
    """Checksum of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _small_files(size: ModelSize, vocab: Vocabulary) -> dict[str, bytes]:
    ids = {"eos_token_id": vocab.end_of_turn, "pad_token_id": vocab.padding}
    return {
        "config.json": _json_bytes(_config(size, vocab.size) | ids),
        "generation_config.json": _json_bytes(ids),
        **tokenizer_files(vocab, max_tokens=size.max_tokens),
    }


def _config(size: ModelSize, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": size.max_tokens,
        "model_type": "qwen3",
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
