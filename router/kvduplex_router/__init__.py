"""KV-cache-aware router for prefill/decode fleets."""
