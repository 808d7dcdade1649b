"""Open the connector of a planned engine on the emulated platform, as its worker does; print what it runs on.

Takes a file with ``argv`` of the engine and a ``rendezvous`` file to create, and prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

BLOCKS = 16


def main(plan: dict[str, Any]) -> None:
    config = engine_config(plan["argv"])
    cache_config, spec = kv_cache(config)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{plan['rendezvous']}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config)
        worker = connector.connector_worker
        shape = (BLOCKS, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        layers = cache_config.kv_cache_groups[0].layer_names
        connector.register_kv_caches({layer: torch.zeros(shape, dtype=spec.dtype) for layer in layers})
        found = {
            "platform": current_platform.device_type,
            "out_of_tree": current_platform.is_out_of_tree(),
            "connector": type(connector).__name__,
            "worker": type(worker).__name__,
            "device": worker.device_type,
            "buffer": worker.kv_buffer_device,
            "staged_in_host_memory": worker.use_host_buffer,
            "memory": worker.nixl_memory_type,
            "block_size": spec.block_size,
            "layers": len(layers),
            "regions": len(worker.kv_caches_base_addr[worker.engine_id][0]),
        }
        connector.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


def engine_config(argv: list[str]) -> Any:
    """From a command line to vLLM's configuration."""
    namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    config = AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
    config.kv_transfer_config.kv_connector_extra_config["backends"] = ["UCX"]  # LIBFABRIC needs EFA
    config.cache_config.kv_cache_layout = "LBHNC"  # the engine core decides it before workers open connectors
    return config


def kv_cache(config: Any) -> tuple[Any, Any]:
    """A cache of `BLOCKS` blocks for every layer of the model."""
    model, parallel = config.model_config, config.parallel_config
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    layers = [f"model.layers.{index}.self_attn.attn" for index in range(model.get_num_layers(parallel))]
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * BLOCKS * len(layers), layers=layers, layer_stride=page * BLOCKS, block_stride=page
    )
    return KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(layers, spec)]), spec


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
