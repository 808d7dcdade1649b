"""Several simulated engines in one process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self, TextIO

import uvloop
import zmq.asyncio

from kvduplex_bench.sim.http.service import SimEngine
from kvduplex_bench.sim.http.tokens import Tokens
from kvduplex_bench.sim.settings import EngineAddress, EngineSettings

__all__ = ["SimFleet", "addresses", "serve"]


def addresses(count: int, *, host: str, port: int) -> list[EngineAddress]:
    """Where `count` engines listen: HTTP from `port` on, then events, replays and leases, `count` ports each."""
    return [
        EngineAddress(host, port + at, port + count + at, port + 2 * count + at, port + 3 * count + at)
        for at in range(count)
    ]


class SimFleet:
    """Engines that start and end together.

    Args:
        engines: What they are.
    """

    def __init__(self, engines: Iterable[EngineSettings]) -> None:
        self._settings = list(engines)
        self._tokens: dict[Path, Tokens] = {}
        self._dying: set[asyncio.Task[None]] = set()
        self.engines: list[SimEngine] = []

    async def __aenter__(self) -> Self:
        """Start them.

        Raises:
            SimError: One cannot start; none is left running.
        """
        self._context = zmq.asyncio.Context()
        try:
            for settings in self._settings:
                await self._start(settings)
        except BaseException:
            await self.close(grace_s=0.0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End them."""
        await self.close(grace_s=0.0)

    async def close(self, *, grace_s: float) -> None:
        """End them, finishing what is being answered within `grace_s`."""
        await asyncio.gather(*self._dying, *(engine.stop(grace_s) for engine in self.engines))
        self.engines = []
        self._context.destroy(linger=0)

    async def _start(self, settings: EngineSettings) -> None:
        tokens = self._tokens.get(settings.tokenizer)
        if tokens is None:
            tokens = self._tokens[settings.tokenizer] = Tokens(settings.tokenizer)
        engine = SimEngine(settings, tokens=tokens, context=self._context, on_kill=self._kill)
        await engine.start()
        self.engines.append(engine)

    def _kill(self, engine: SimEngine) -> None:
        if engine in self.engines:
            self.engines.remove(engine)
            task = asyncio.get_running_loop().create_task(engine.kill())
            self._dying.add(task)
            task.add_done_callback(self._dying.discard)


def serve(
    engines: Sequence[EngineSettings],
    *,
    grace_s: float,
    as_json: bool,
    announce: Callable[[Sequence[EngineSettings]], None],
    output: TextIO = sys.stdout,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        engines: What to start.
        grace_s: Seconds that answers in progress get at the end.
        as_json: Print one JSON line when ready instead of calling `announce`.
        announce: Tells a person that all are ready.
        output: Where the JSON line goes.

    Raises:
        SimError: One cannot start.
    """

    async def run() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        fleet = SimFleet(engines)
        await fleet.__aenter__()
        if as_json:
            print(json.dumps({"ready": True, "engines": [_as_dict(each) for each in engines]}), file=output, flush=True)
        else:
            announce(engines)
        await ended.wait()
        await fleet.close(grace_s=grace_s)

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(run())


def _as_dict(engine: EngineSettings) -> dict[str, object]:
    address = engine.address
    return {
        "role": engine.role.value,
        "url": address.url,
        "entry": address.entry(engine.role),
        "kv_events": f"{address.host}:{address.events}",
        "kv_replay": f"{address.host}:{address.replay}",
        "lease": f"{address.host}:{address.lease}",
    }
