"""``python -m kvduplex.node.router_process FILE``: a router that may listen beside its predecessor.

The kernel spreads new connections over both until the predecessor closes its socket. Otherwise the same as
``python -m kvduplex_router --config FILE``; several workers share their address in their own way, and cannot overlap.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from kvduplex_router.compose import compose
from kvduplex_router.config import RouterConfig, build_config
from kvduplex_router.errors import ConfigError
from kvduplex_router.server import run
from kvduplex_router.serving import bind, calm_collector, log_to_stderr, serve

__all__ = ["SERVING", "main"]

SERVING = "router on http://"
"""What the router logs when its socket is open and its engines are known."""


def main() -> None:
    """Serve until told to stop; exit code 2 when the configuration cannot be used."""
    log_to_stderr()
    try:
        config = build_config(Path(sys.argv[1]))
        if config.workers > 1:
            run(config)
        else:
            _run_beside(config)
    except ConfigError as error:
        sys.stderr.write(f"kvduplex router: {error}\n")
        sys.exit(2)


def _run_beside(config: RouterConfig) -> None:
    async def serve_here() -> None:
        await serve(compose(config), config, listener)

    with (
        bind(config.listen, write_s=config.timeouts.client_write_s, shared=True) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        calm_collector()
        runner.run(serve_here())


if __name__ == "__main__":
    main()
