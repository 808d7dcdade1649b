"""``kvduplex sim``: simulated engines, for trying routers, policies and failures without models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvduplex.console import note, say
from kvduplex.errors import KvduplexError, UsageError
from kvduplex.folders import Folders
from kvduplex_bench.sim.core.timing import load_timing
from kvduplex_bench.sim.errors import SimError
from kvduplex_bench.sim.fleet import addresses, serve
from kvduplex_bench.sim.settings import Connector, EngineSettings, Role

__all__ = ["app"]

app = typer.Typer(add_completion=False, help="Simulated engines.")

_MOST = 256


@app.command()
def sim(
    replicas: Annotated[int, typer.Option(min=0, max=_MOST, help="Engines that do everything.")] = 0,
    prefill: Annotated[int, typer.Option(min=0, max=_MOST, help="Prefill engines.")] = 0,
    decode: Annotated[int, typer.Option(min=0, max=_MOST, help="Decode engines.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1024, max=64_000, help="First port; each engine takes four.")] = 9100,
    model_timing: Annotated[
        str, typer.Option(help="Timing profile: a name or a YAML file; a wrong name lists them.")
    ] = "cpu-tiny",
    time_scale: Annotated[
        float, typer.Option(min=0.001, max=1000, help="Seconds that pass for one second of the profile.")
    ] = 1.0,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder with tokenizer.json; the generated one.")] = None,
    connector: Annotated[Connector, typer.Option(help="How KV comes back to prefill engines.")] = Connector.LEASED,
    prefix_caching: Annotated[bool, typer.Option(help="Prefix caches of replicas and prefill engines.")] = True,
    kv_blocks: Annotated[int, typer.Option(min=0, help="KV blocks of each engine; 0 takes the profile's.")] = 0,
    stream_interval: Annotated[int, typer.Option(min=1, help="Tokens in one part of a stream.")] = 1,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that answers in progress get at the end.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line when ready.")] = False,
) -> None:
    """Start simulated engines: vLLM's HTTP, KV events and leases, timing from a profile, no model."""
    roles = [Role.REPLICA] * replicas + [Role.PREFILL] * prefill + [Role.DECODE] * decode
    if not roles or len(roles) > _MOST or (prefill > 0) != (decode > 0):
        raise UsageError(
            f"give --replicas N, or --prefill N and --decode M; {_MOST} engines at most "
            f"(got {replicas} replicas, {prefill} prefill, {decode} decode)"
        )
    try:
        timing = load_timing(model_timing)
        if kv_blocks:
            timing = msgspec.structs.replace(timing, kv_blocks=kv_blocks)
        folder = tokenizer or _generated_tokenizer()
        engines = [
            EngineSettings(
                role=role, address=address, timing=timing, tokenizer=folder, time_scale=time_scale,
                connector=connector, caching=prefix_caching or role is Role.DECODE, stream_interval=stream_interval,
                seed=number,
            )
            for number, (role, address) in enumerate(
                zip(roles, addresses(len(roles), host=host, port=port), strict=True)
            )
        ]  # fmt: skip
        serve(engines, grace_s=grace, as_json=as_json, announce=_announce)
    except SimError as error:
        raise KvduplexError(str(error)) from error


def _generated_tokenizer() -> Path:
    from kvduplex.tinymodel import SIZES, ensure_model  # noqa: PLC0415 - numpy would slow down every other command

    cache = Folders.from_environ(os.environ, home=Path.home(), uid=os.getuid()).cache
    return ensure_model(SIZES["tiny"], cache, report=note)


def _announce(engines: Sequence[EngineSettings]) -> None:
    say(f"{len(engines)} simulated engines are ready ({engines[0].timing.name}). Put a router in front of them:")
    flags = {Role.REPLICA: "--engine", Role.PREFILL: "--prefill", Role.DECODE: "--decode"}
    entries = [f"  {flags[each.role]} '{each.address.entry(each.role)}'" for each in engines]
    say(" \\\n".join(["kvduplex router --listen 127.0.0.1:8000", *entries]))
    say(f"Failures on command: curl -d '{{\"slow\": 3}}' {engines[0].address.url}/sim/faults")
