"""Random weights of a Qwen3, the same bytes on every machine.

Each tensor has a generator of its own, seeded by its name. Only the raw output of PCG64 is used, whose stream numpy
guarantees (NEP 19), and only arithmetic that IEEE 754 fixes to the bit; numpy's normal distribution is neither.

Plain random initialisation answers every prompt with one token for ever. The scales below were chosen by trying them:
sharp attention, so that one edited word changes the answer even in a context of 1,500 words; and an output layer that
speaks only whole words, so that an answer is readable, and its text encodes to the tokens that were generated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kvduplex.tinymodel.sizes import ModelSize
from kvduplex.tinymodel.tokenizer import Vocabulary

__all__ = ["tensor_shapes", "tensors"]

_EMBEDDING_SCALE = 0.5
_QUERY_KEY_NORM = 2.5  # attention logits have this value's square as standard deviation: a few tokens win
_ATTENTION_GAIN = 2.5
_FEED_FORWARD_GAIN = 1.6
_LOGIT_SCALE = 4.0
_MANTISSA_BITS = 24  # integers of this many bits are exact in float32


def tensor_shapes(size: ModelSize, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape by its name in the transformers library's Qwen3, in file order."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, size.hidden)}
    for layer in range(size.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(size).items()}
    return shapes | {"model.norm.weight": (size.hidden,), "lm_head.weight": (vocab_size, size.hidden)}


def _layer_shapes(size: ModelSize) -> dict[str, tuple[int, ...]]:
    query, key_value = size.heads * size.head_dim, size.kv_heads * size.head_dim
    return {
        "input_layernorm.weight": (size.hidden,),
        "self_attn.q_proj.weight": (query, size.hidden),
        "self_attn.k_proj.weight": (key_value, size.hidden),
        "self_attn.v_proj.weight": (key_value, size.hidden),
        "self_attn.o_proj.weight": (size.hidden, query),
        "self_attn.q_norm.weight": (size.head_dim,),
        "self_attn.k_norm.weight": (size.head_dim,),
        "post_attention_layernorm.weight": (size.hidden,),
        "mlp.gate_proj.weight": (size.intermediate, size.hidden),
        "mlp.up_proj.weight": (size.intermediate, size.hidden),
        "mlp.down_proj.weight": (size.hidden, size.intermediate),
    }


def tensors(
    shapes: Mapping[str, tuple[int, ...]], vocab: Vocabulary, *, seed: str
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors of `shapes`, one after the other.

    Args:
        shapes: What `tensor_shapes` returned.
        vocab: Tells which tokens the model may speak.
        seed: Any text; another one gives another model.
    """
    for name, shape in shapes.items():
        yield name, _tensor(name, shape, vocab, seed)


def _tensor(name: str, shape: tuple[int, ...], vocab: Vocabulary, seed: str) -> NDArray[np.float32]:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return np.full(shape, _QUERY_KEY_NORM, np.float32)
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    values = _uniform(f"{seed}/{name}", shape, _deviation(name, fan_in=shape[-1]))
    if name == "lm_head.weight":
        return _only_rows(values, (*vocab.spoken, vocab.end_of_turn))
    return values


def _deviation(name: str, fan_in: int) -> float:
    """Standard deviation of a tensor's values."""
    gains = {"o_proj": _ATTENTION_GAIN, "down_proj": _FEED_FORWARD_GAIN, "lm_head": _LOGIT_SCALE}
    if "embed_tokens" in name:
        return _EMBEDDING_SCALE
    return next((gain for part, gain in gains.items() if part in name), 1.0) / math.sqrt(fan_in)


def _uniform(seed: str, shape: tuple[int, ...], deviation: float) -> NDArray[np.float32]:
    """Evenly distributed values of mean 0."""
    bits = np.random.PCG64(int.from_bytes(hashlib.sha256(seed.encode()).digest())).random_raw(math.prod(shape))
    centred = (bits >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float32) - np.float32(2 ** (_MANTISSA_BITS - 1))
    width = deviation * math.sqrt(3)  # an even distribution over [-w, w) has the deviation w / sqrt(3)
    scaled: NDArray[np.float32] = centred * np.float32(width / 2 ** (_MANTISSA_BITS - 1))
    return scaled.reshape(shape)


def _only_rows(values: NDArray[np.float32], rows: tuple[int, ...]) -> NDArray[np.float32]:
    """Zero all other rows: their logits are 0, which loses against the largest of hundreds of random ones."""
    kept = np.zeros_like(values)
    kept[list(rows)] = values[list(rows)]
    return kept
