"""What vLLM's log says about how far an engine's start has come.

The marks are texts of vLLM 0.29 to 0.33; an unknown version only shows fewer stages.
"""

from __future__ import annotations

from kvduplex.supervise import Stage

__all__ = ["VLLM_STAGES"]

VLLM_STAGES = (
    Stage("non-default args", "reading the configuration"),
    Stage("Initializing a V1 LLM engine", "starting the engine core"),
    Stage("rank 0 in world size", "starting the worker"),
    Stage("Starting to load model", "loading weights"),
    Stage("Loading weights took", "weights loaded"),
    Stage("KV cache size", "allocating the KV cache"),
    Stage("Initialized NIXL agent", "starting NIXL"),
    Stage("Registering KV_Caches", "registering the KV cache"),
    Stage("init engine (profile", "KV cache ready"),
    Stage("Starting vLLM server", "starting the HTTP server"),
)
