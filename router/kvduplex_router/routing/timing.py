"""``python -m kvduplex_router.routing.timing``: how long decisions take, and how much memory what they rest on.

No engine and no network: a fleet of idle engines, an index filled through the event decoder, and requests whose prompts
the engines partly hold. Times are CPU time, so that they mean the same on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvduplex_router.config import BreakerConfig, EventsConfig, Policy, RoutingConfig
from kvduplex_router.events.feed import Feed
from kvduplex_router.events.hashing import chain, root, token_bytes
from kvduplex_router.fleet.breaker import Breaker
from kvduplex_router.fleet.engine import Engine, EngineAddress, EngineRole
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.http.pool import Origin, Pool, Timeouts
from kvduplex_router.http.watchdog import Watchdog
from kvduplex_router.requests.apis import CHAT, COMPLETIONS
from kvduplex_router.requests.body import Body
from kvduplex_router.routing.picker import PickContext
from kvduplex_router.routing.service import RoutingService

__all__ = ["main"]

_BLOCK: Final = 16
_CHAIN: Final = 500
_SHARED: Final = 100
_WORDS: Final = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: Flags; those of the process when not given.
    """
    parser = argparse.ArgumentParser(prog="python -m kvduplex_router.routing.timing", description=__doc__)
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=5_000_000, help="blocks in the index")
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--tokenizer", type=Path, help="a model's folder, to time tokenisation as well")
    given = parser.parse_args(argv)
    service, fleet = _service(given.engines, given.blocks)
    for engine in fleet.engines:
        service.desks.of(engine).trust.complete()
    service.desks.judge(fleet.engines)
    prompts = _fill(service, fleet, given.blocks)
    asyncio.run(_decide(service, fleet, prompts, given.requests))
    if given.tokenizer is not None:
        asyncio.run(_tokenise(given.tokenizer))
    return 0


def _say(name: str, value: str) -> None:
    sys.stdout.write(f"{name:<46} {value}\n")
    sys.stdout.flush()


def _service(engines: int, blocks: int) -> tuple[RoutingService, Fleet]:
    fleet = Fleet()
    breaker = BreakerConfig()
    watchdog, limits = Watchdog(), Timeouts()
    for i in range(engines):
        origin = Origin("http", f"10.0.{i // 250}.{i % 250}", 8000)
        address = EngineAddress(origin.authority, EngineRole.REPLICA, origin, (origin.host,))
        made = Breaker(failures=breaker.failures, open_s=breaker.open_s, clock=time.monotonic)
        fleet.join(Engine(address, pool=Pool(origin, timeouts=limits, watchdog=watchdog), breaker=made))
    events = EventsConfig(max_blocks=max(blocks, 1_000), max_engines=max(64, engines))
    return RoutingService(RoutingConfig(policy=Policy.KV_EVENTS, events=events), fleet, clock=time.monotonic), fleet


def _fill(service: RoutingService, fleet: Fleet, blocks: int) -> list[list[int]]:
    """Enter conversations, each of 500 blocks of which 100 are shared, and return some of them as token ids."""
    rng = random.Random(1)
    shared = [[rng.randrange(150_000) for _ in range(_SHARED * _BLOCK)] for _ in range(16)]
    feeds = {e.name: _feed(service, e) for e in fleet.engines}
    kept: list[list[int]] = []
    before, spent, count, number = _resident(), 0.0, 0, 0
    while count < blocks:
        tokens = shared[number % 16] + [rng.randrange(150_000) for _ in range((_CHAIN - _SHARED) * _BLOCK)]
        engine = fleet.engines[number % len(fleet.engines)].name
        payload = _stored(tokens, engine)
        began = time.thread_time()
        feeds[engine].message([b"", (number // len(fleet.engines)).to_bytes(8, "big"), payload])
        spent += time.thread_time() - began
        kept = [*kept, tokens][-64:]
        count, number = count + _CHAIN, number + 1
    held = sum(service.index.sizes().values())
    _say("engines", str(len(fleet.engines)))
    _say("blocks held, all engines together", f"{held:,}")
    grown = max(1, _resident() - before)
    _say("memory that they took", f"{grown / held:.0f} bytes each")
    _say("blocks per GB", f"{held / grown * 1e9 / 1e6:.1f} million")
    _say("events entered", f"{count / spent:,.0f} blocks/s of one core, decoding and hashing included")
    return kept


def _feed(service: RoutingService, engine: Engine) -> Feed:
    trust = service.desks.of(engine).trust
    return Feed(engine.name, index=service.index, trust=trust, clock=time.monotonic, ask=None)


def _stored(tokens: list[int], engine: str) -> bytes:
    names = [hash((engine, *tokens[(i - 1) * _BLOCK : i * _BLOCK])) % 2**64 for i in range(1, _CHAIN + 1)]
    event = {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": tokens,
        "block_size": _BLOCK,
    }  # fmt: skip
    return msgspec.msgpack.encode([0.0, [event], 0])


async def _decide(service: RoutingService, fleet: Fleet, prompts: list[list[int]], requests: int) -> None:
    """Requests of 8,000 tokens, of which engines hold a tenth to all; each is decided, reserved and let go again."""
    rng = random.Random(2)
    facts_s: list[float] = []
    choose_s: list[float] = []
    reserve_s: list[float] = []
    for number in range(requests):
        tokens = rng.choice(prompts)
        cut = rng.randrange(len(tokens) // 10, len(tokens))
        prompt = tokens[:cut] + [rng.randrange(150_000) for _ in range(len(tokens) - cut)]
        body = Body.parse(json.dumps({"model": "m", "prompt": prompt}).encode())
        made = await service.tokeniser.prompt(COMPLETIONS, body)
        made.chain(_BLOCK)
        made.chain(64, scope=f"{made.source.value} {made.model}")
        began = time.thread_time()
        facts = service.looked_up(made, session=number)
        looked = time.thread_time()
        context = PickContext(facts=facts)
        engine = service.picker.pick(fleet.replicas, context)
        chosen = time.thread_time()
        assert engine is not None  # noqa: S101 - all are usable
        reservation = service.reserve(engine, context)
        reserved = time.thread_time()
        assert reservation is not None  # noqa: S101 - the prompt was counted
        reservation.end()
        await asyncio.sleep(0)
        facts_s.append(looked - began)
        choose_s.append(chosen - looked)
        reserve_s.append(reserved - chosen)
    _show("find who holds how much of the prompt", facts_s)
    _show("choose", choose_s)
    _show("decision, both together", [a + b for a, b in zip(facts_s, choose_s, strict=True)])
    _show("enter it into the engine's figures", reserve_s)
    hashed = [_timed(lambda: _hashes(rng.choice(prompts))) for _ in range(200)]
    _show("hash 8,000 tokens that were never seen", hashed)


def _hashes(tokens: list[int]) -> None:
    chain(root(_BLOCK), token_bytes(tokens), _BLOCK)


async def _tokenise(model: Path) -> None:
    """A conversation of 30 turns that grew by one, over and over."""
    config = RoutingConfig(policy=Policy.PREFIX, tokenizer=model)
    service = RoutingService(config, Fleet(), clock=time.monotonic)
    rng = random.Random(3)
    spent: list[float] = []
    count = 0
    for _ in range(30):
        messages: list[dict[str, Any]] = [{"role": "system", "content": _text(rng, 400)}]
        for turn in range(30):
            messages.append({"role": "user", "content": _text(rng, 100)})
            body = Body.parse(json.dumps({"model": "m", "messages": messages}).encode())
            began = time.thread_time()
            prompt = await service.tokeniser.prompt(CHAT, body)
            prompt.chain(_BLOCK)
            prompt.chain(64, scope="x")
            if turn == 29:  # noqa: PLR2004 - the last
                spent.append(time.thread_time() - began)
                count = prompt.count
            messages.append({"role": "assistant", "content": _text(rng, 150)})
    _show(f"render, tokenise, hash turn 30 ({count} tokens)", spent)


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def _timed(work: Callable[[], None]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _show(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    median, late = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    _say(name, f"p50 {median * 1e6:.0f} µs, p99 {late * 1e6:.0f} µs")


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
