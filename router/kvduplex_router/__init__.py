"""KV-cache-aware router for disaggregated prefill/decode engines: one OpenAI endpoint in front of many vLLM servers."""
