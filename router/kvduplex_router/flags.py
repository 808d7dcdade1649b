"""Command-line flags of the router, for ``python -m kvduplex_router`` and whoever wraps it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvduplex_router.config import OnNoPrefill, Policy, Reuse, RouterConfig, build_config

__all__ = ["config_from_argv"]


def config_from_argv(argv: Sequence[str]) -> RouterConfig:
    """Parse flags and the file they may name.

    Raises:
        ConfigError: The result is not valid.
        SystemExit: A flag is unknown, or help was asked for.
    """
    given = _parser().parse_args(argv)
    return build_config(
        given.config,
        listen=given.listen,
        prefill=tuple(given.prefill),
        decode=tuple(given.decode),
        engines=tuple(given.engine),
        reuse=given.reuse,
        on_no_prefill=given.on_no_prefill,
        workers=given.workers,
        policy=given.policy,
        tokenizer=given.tokenizer,
        decoder_kv_blocks_ttl_s=given.decoder_kv_blocks_ttl,
        state_url=given.state,
        otlp_endpoint=given.otlp_endpoint,
        engines_file=given.engines_file,
        engines_dns=tuple(given.engines_dns),
        engines_ec2=tuple(given.engines_ec2),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvduplex router", description="KV-cache-aware router for vLLM engines.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file; flags override it")
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to serve on (127.0.0.1:8000)")
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="prefill engine; repeatable")
    parser.add_argument(
        "--decode", action="append", default=[], metavar="URL[#PART=HOST:PORT&...]",
        help="decode engine; parts are lease, kv_events, kv_replay; repeatable",
    )  # fmt: skip
    parser.add_argument("--engine", action="append", default=[], metavar="URL", help="plain replica; repeatable")
    parser.add_argument(
        "--policy", choices=list(Policy), help="how replicas and prefill engines are picked (least_in_flight)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="the served model's folder or tokenizer.json, to count tokens"
    )
    parser.add_argument("--reuse", choices=list(Reuse), help="how KV flows back on the next turn (auto)")
    parser.add_argument("--on-no-prefill", choices=list(OnNoPrefill), help="without a usable prefill engine (fail)")
    parser.add_argument(
        "--decoder-kv-blocks-ttl", type=float, metavar="SECONDS",
        help="what the decode engines run with: how long they keep a finished turn's blocks (480)",
    )  # fmt: skip
    parser.add_argument("--engines-file", metavar="FILE", help="engines listed in a file that may change")
    parser.add_argument(
        "--engines-dns", action="append", default=[], metavar="NAME:PORT=ROLE",
        help="an engine at every address of a name, with NAME:srv=ROLE at every SRV record; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--engines-ec2", action="append", default=[], metavar="tag:KEY=VALUE[,asg:NAME][,role=ROLE]",
        help="engines on EC2 instances with these tags, or of an Auto Scaling group; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--state", metavar="valkey://HOST:PORT/DB", help="share conversations with other routers through this server"
    )
    parser.add_argument("--otlp-endpoint", metavar="URL", help="send traces there by OTLP over HTTP (none)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (1)")
    return parser
