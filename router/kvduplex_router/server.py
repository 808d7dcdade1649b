"""Runs a router: in this process, or as several workers."""

from __future__ import annotations

import asyncio
import contextlib

import uvloop

from kvduplex_router.compose import compose
from kvduplex_router.config import RouterConfig
from kvduplex_router.serving import bind, calm_collector, serve
from kvduplex_router.workers.supervisor import run_workers

__all__ = ["run"]


def run(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: An address cannot be bound, or a file or secret that the configuration names is missing.
    """
    if config.workers > 1:
        run_workers(config)
        return
    with contextlib.ExitStack() as stack:
        write_s = config.timeouts.client_write_s
        listener = stack.enter_context(bind(config.listen, write_s=write_s))
        admin = stack.enter_context(bind(config.admin.listen, write_s=write_s)) if config.admin.listen else None
        calm_collector()
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))

        async def main() -> None:
            await serve(compose(config), config, listener, admin)

        runner.run(main())
