"""Whether a model's weights can lie on one instance at all. A lower bound: the engine's own sizing is exact."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvduplex_infra.cluster.model import Model
from kvduplex_transfer.hostchecks.instances import INSTANCE_TYPES, Accelerator

__all__ = ["KNOWN_MODELS", "instance_memory_gib", "weights_gib"]

KNOWN_MODELS: Mapping[str, float] = MappingProxyType(
    {
        "Qwen/Qwen3-0.6B": 0.6,
        "Qwen/Qwen3-8B": 8.2,
        "Qwen/Qwen3-32B": 32.8,
        "Qwen/Qwen3-30B-A3B": 30.5,
        "Qwen/Qwen3-235B-A22B": 235.0,
        "meta-llama/Llama-3.1-8B-Instruct": 8.0,
        "meta-llama/Llama-3.3-70B-Instruct": 70.6,
        "openai/gpt-oss-120b": 116.8,
    }
)
"""Parameters in thousand millions, from the model cards."""

_GIB_PER_VCPU = {"c": 2, "m": 4, "r": 8}
_SIZES = {"large": 2, "xlarge": 4}
_WEIGHTS_SHARE = 0.85
"""Share of the memory that weights may take; the rest is KV cache, activations and the runtime."""


def weights_gib(model: Model) -> float | None:
    """Size of the weights in GiB, or None when nothing says how many parameters the model has."""
    parameters = model.parameters_b or KNOWN_MODELS.get(model.id)
    return None if parameters is None else parameters * 1e9 * model.bytes_per_parameter / 2**30


def instance_memory_gib(instance_type: str) -> float | None:
    """Memory that weights may use on one instance, in GiB, or None when the tables do not know the type."""
    row = INSTANCE_TYPES.get(instance_type)
    if row is not None and row.accelerator is not Accelerator.NONE:
        if row.devices is None or row.memory_gib is None:
            return None
        return row.devices * row.memory_gib * _WEIGHTS_SHARE
    family, _, size = instance_type.partition(".")
    vcpus = _SIZES.get(size) or (int(size.removesuffix("xlarge")) * 4 if size.removesuffix("xlarge").isdigit() else 0)
    per_vcpu = _GIB_PER_VCPU.get(family[:1], 0)
    return vcpus * per_vcpu * _WEIGHTS_SHARE or None
