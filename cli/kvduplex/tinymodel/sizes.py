"""Shapes of the generated models, and the pinned checksums of their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SIZES", "ModelSize"]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A Qwen3 shape.

    Attributes:
        name: As in ``kvduplex model make --size NAME``.
        version: Raised whenever any generated file changes, so that caches of older versions are not reused.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of one head.
        intermediate: Width inside the feed-forward layers.
        max_tokens: Longest context.
        sha256: Expected checksum of each file, in hexadecimal, by file name.
    """

    name: str
    version: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_tokens: int
    sha256: Mapping[str, str]

    @property
    def folder(self) -> str:
        """Name of the folder below the cache's ``models``."""
        return f"qwen3-{self.name}-v{self.version}"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token occupies in float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


_TOKENIZER_SHA256 = {
    "tokenizer.json": "44d20d0b5f198df2e13e771c3eff48f94d04c2f435d12d04b88b93242aaaa79d",
    "tokenizer_config.json": "19b0740524ab954732fab9eebeaacd5efb6b87795a0a859b5a1d67c479692350",
}

_TINY = ModelSize(
    name="tiny",
    version=1,
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=192,
    max_tokens=32_768,
    sha256={
        "config.json": "ce818e145d9efd8a40d3a28899a5624a4dc0c485296128b70e34e1cc3ca5b812",
        "generation_config.json": "f27b886d0c983584c907bf89da247069e67b5b9dd26da647e3f36f9d8a6a2850",
        "model.safetensors": "53e8bae5492afb93ee894390f1b079e2fff67d4b1263343bac5d7a1add70e1f3",
        **_TOKENIZER_SHA256,
    },
)

_20M = ModelSize(
    name="20m",
    version=1,
    layers=8,
    hidden=512,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=1536,
    max_tokens=32_768,
    sha256={
        "config.json": "4e70310dda6844e647b487118010ab3c703b5ca3ca006d744009e90b772eb056",
        "generation_config.json": "f27b886d0c983584c907bf89da247069e67b5b9dd26da647e3f36f9d8a6a2850",
        "model.safetensors": "5451f61ade7dfacf1a3c2a93048601e7f57005948b972c9bbe3805dbb1e49435",
        **_TOKENIZER_SHA256,
    },
)

_85M = ModelSize(
    name="85m",
    version=1,
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=4,
    head_dim=64,
    intermediate=2304,
    max_tokens=32_768,
    sha256={
        "config.json": "db509de8351bd565d61d02e8b2b3e82bb84b6f4680bc67e70f280407f58043be",
        "generation_config.json": "f27b886d0c983584c907bf89da247069e67b5b9dd26da647e3f36f9d8a6a2850",
        "model.safetensors": "d9bd1348081bc512018c41bfeccd70de4a18d3078c706ee3830ce6028c68a93b",
        **_TOKENIZER_SHA256,
    },
)

SIZES: Mapping[str, ModelSize] = {size.name: size for size in (_TINY, _20M, _85M)}
