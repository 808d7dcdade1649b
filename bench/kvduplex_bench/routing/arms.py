"""The routers under comparison, and how each is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["OURS", "PEER_POLICIES", "Arm", "Started", "ours", "peers"]

OURS: Final = ("round_robin", "least_in_flight", "session", "prefix", "kv_events")
"""Policies of this router."""

PEER_POLICIES: Final = ("round_robin", "cache_aware", "consistent_hash", "kv_aware")
"""Policies of the peer."""

_TOKENIZED: Final = frozenset({"prefix", "kv_events"})


@dataclass(frozen=True, slots=True)
class Started:
    """The engines an arm stands in front of, as ``kvduplex sim --json`` printed them.

    Attributes:
        engines: One mapping each: role, url, entry, kv_events, kv_replay.
        tokenizer: Folder of the served model's tokenizer.
        block_size: Tokens of a KV block.
        model: Served model name.
    """

    engines: Sequence[Mapping[str, Any]]
    tokenizer: Path
    block_size: int
    model: str


@dataclass(frozen=True, slots=True)
class Arm:
    """One router with one policy.

    Attributes:
        name: For tables.
        policy: Its name for the router.
        program: Program of a peer; empty for ours.
        options: Further options.
    """

    name: str
    policy: str
    program: str = ""
    options: tuple[str, ...] = field(default=())

    def command(self, started: Started, port: int, metrics_port: int) -> list[str]:
        """How it is started."""
        return self._peer(started, port, metrics_port) if self.program else self._ours(started, port)

    def environment(self, started: Started) -> dict[str, str]:
        """Environment variables it needs besides."""
        return {"VLLM_ROUTER_TOKENIZER": str(started.tokenizer)} if self.policy == "kv_aware" else {}

    def _ours(self, started: Started, port: int) -> list[str]:
        flags = {"replica": "--engine", "prefill": "--prefill", "decode": "--decode"}
        engines = [part for each in started.engines for part in (flags[each["role"]], str(each["entry"]))]
        tokens = ["--tokenizer", str(started.tokenizer)] if self.policy in _TOKENIZED else []
        listen = ["--listen", f"127.0.0.1:{port}", "--policy", self.policy]
        return [sys.executable, "-m", "kvduplex_router", *listen, *tokens, *engines, *self.options]

    def _peer(self, started: Started, port: int, metrics_port: int) -> list[str]:
        roles: list[str] = []
        replicas = [str(each["url"]) for each in started.engines if each["role"] == "replica"]
        if replicas:
            roles = ["--worker-urls", *replicas]
        else:
            roles = ["--vllm-pd-disaggregation"]
            for each in started.engines:
                roles += [f"--{each['role']}", str(each["url"])]
            if self.policy == "kv_aware":
                roles += ["--prefill-policy", "kv_aware", "--decode-policy", "consistent_hash"]
        listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
        policy = ["--policy", "cache_aware" if self.policy == "kv_aware" and not replicas else self.policy]
        return [self.program, *listen, *policy, *self._peer_events(started, bool(replicas)), *roles, *self.options]

    def _peer_events(self, started: Started, replicas: bool) -> list[str]:
        if self.policy != "kv_aware":
            return []
        if not replicas:
            return [
                part
                for each in started.engines
                if each["role"] == "prefill"
                for part in ("--pd-kv-events", f"{each['url']}=tcp://{each['kv_events']}")
            ]
        found = ["--kv-event-block-size", str(started.block_size), "--kv-event-model", started.model]
        for each in started.engines:
            found += ["--kv-event-source", f"{each['url']}=tcp://{each['kv_events']}"]
            found += ["--kv-event-replay-source", f"{each['url']}=tcp://{each['kv_replay']}"]
        return found


def ours(policies: Sequence[str] = OURS) -> list[Arm]:
    """This router at each level."""
    return [Arm(f"kvduplex {policy}", policy) for policy in policies]


def peers(program: str, policies: Sequence[str] = PEER_POLICIES) -> list[Arm]:
    """The peer with each policy."""
    return [Arm(f"vllm-router {policy}", policy, program) for policy in policies]
