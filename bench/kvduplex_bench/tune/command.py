"""``kvduplex bench tune``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from kvduplex_bench.console import result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn import stage as stages
from kvduplex_bench.multiturn.engines import Engines
from kvduplex_bench.multiturn.provenance import provenance
from kvduplex_bench.multiturn.target import Client
from kvduplex_bench.multiturn.wire import Origin
from kvduplex_bench.multiturn.workload import Arm
from kvduplex_bench.scrape import scrape
from kvduplex_bench.tune.advice import Advice, Habits, advise
from kvduplex_bench.tune.costs import Compute, Read, Sample, fit_compute, fit_read
from kvduplex_bench.tune.probe import Capacity, Probe, capacity

__all__ = ["tune"]

_FOLDER: Final = Path(".bench/tune")
_MAX_MODEL_LEN: Final = 32_768


def tune(
    url: Annotated[str, typer.Option(help="Router of a running cluster, with reuse on.")] = "",
    prefill: Annotated[str, typer.Option(help="Its prefill engine.")] = "",
    decode: Annotated[str, typer.Option(help="Its decode engine.")] = "",
    serve: Annotated[str, typer.Option(help="cpu: start everything on this machine instead.")] = "",
    size: Annotated[str, typer.Option(help="With --serve: size of the generated model.")] = "20m",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, with commas.")] = "128,256,512,1024,2048,4096",
    repeats: Annotated[int, typer.Option(min=1, help="Requests of each length.")] = 3,
    gap_p50: Annotated[float, typer.Option(help="Seconds in which half of the next turns come.")] = 20.0,
    gap_p95: Annotated[float, typer.Option(help="Seconds in which 95 in 100 have come.")] = 240.0,
    conversations: Annotated[int, typer.Option(help="Open conversations of a decode engine.")] = 16,
    context_tokens: Annotated[int, typer.Option(help="Usual length of a conversation.")] = 8_000,
    in_flight: Annotated[int, typer.Option(help="Requests that a decode engine answers at once.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the texts; another one for each run on engines with a cache.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the figures and the measured costs.")] = _FOLDER,
) -> None:
    """Measure what computing and what reading KV costs here, and recommend threshold, lease times and budget."""
    console = Console(stderr=True)
    try:
        habits = Habits(
            gap_p50_s=gap_p50,
            gap_p95_s=gap_p95,
            conversations=conversations,
            context_tokens=context_tokens,
            in_flight=in_flight,
        )
        sizes = _lengths(lengths)
        with _cluster(url, prefill, decode, serve, size) as (router, engines):
            computed, read, room = asyncio.run(_measure(router, engines, sizes, repeats, seed, console))
        costs = fit_compute(computed), fit_read(read)
        advice = advise(*costs, habits, block_size=room.block_size, capacity_tokens=room.tokens)
        _write(output, computed, read, costs, advice)
    except BenchError as error:
        console.print(f"[red]bench tune:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    _show(result_console(), costs, advice, habits, room, output)


async def _measure(
    url: str, engines: Engines, lengths: list[int], repeats: int, seed: int, console: Console
) -> tuple[list[Sample], list[Sample], Capacity]:
    await engines.must_have_connector()
    router = Client(url, option="--url", headers={}, timeout_s=600)
    served = await router.served(None)
    if served.max_model_len and max(lengths) * 1.2 > served.max_model_len:
        raise BenchError(f"--lengths {max(lengths)}: the engines hold {served.max_model_len} tokens; give shorter ones")

    def told(what: str, sample: Sample) -> None:
        console.print(f"{sample.tokens:>7,} tokens {what} in {sample.seconds * 1e3:,.1f} ms", highlight=False)

    prefill = Client(engines.prefill[0], option="--prefill", headers={}, timeout_s=600)
    probe = Probe(router=router, prefill=prefill, engines=engines, served=served, seed=seed, told=told)
    computed = await probe.compute(lengths, repeats)
    read = await probe.read(lengths, repeats, through_answers=await engines.prefill_cache() is not False)
    room = capacity(await asyncio.to_thread(scrape, engines.decode[0]), engines.decode[0])
    return computed, read, room


@contextmanager
def _cluster(url: str, prefill: str, decode: str, serve: str, size: str) -> Iterator[tuple[str, Engines]]:
    if serve not in {"", "cpu"}:
        raise BenchError(f"--serve {serve}: only cpu can be started here; give --url, --prefill and --decode")
    if serve and (url or prefill or decode):
        raise BenchError("--serve starts its own cluster; leave --url, --prefill and --decode out")
    if serve:
        stage = stages.CpuStage(stages.generated_model(size), _MAX_MODEL_LEN, 1.0, min(2, len(os.sched_getaffinity(0))))
        with stages.staged(stage, stages.Setting("leased", prefill_cache=False), [Arm.ON]) as (target, _):
            yield target.routers[Arm.ON], target.engines
        return
    for option, given in (("--url", url), ("--prefill", prefill), ("--decode", decode)):
        if not given:
            raise BenchError(f"give {option} of a running cluster, or --serve cpu to start one")
        Origin.parse(given, option=option)
    yield url, Engines((prefill.rstrip("/"),), (decode.rstrip("/"),))


def _lengths(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise BenchError(f"--lengths {text}: write numbers of tokens with commas") from error
    if len(found) < 3 or found[0] < 1:  # noqa: PLR2004 - a curve of three parts
        raise BenchError(f"--lengths {text}: give at least three different lengths, each at least 1")
    return found


def _write(
    folder: Path, computed: list[Sample], read: list[Sample], costs: tuple[Compute, Read], advice: Advice
) -> None:
    from kvduplex_bench.tune.curve import write_curve  # noqa: PLC0415 - matplotlib would slow every command down

    origin = provenance(sys.argv[1:])
    versions = origin["versions"]
    source = " | ".join([origin["date"][:10], *(f"{name} {versions[name]}" for name in versions if name != "python")])
    value: dict[str, Any] = {
        **origin,
        "computed": [asdict(sample) for sample in computed],
        "read": [asdict(sample) for sample in read],
        "compute": asdict(costs[0]),
        "reading": asdict(costs[1]),
        "advice": asdict(advice),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tune.json").write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise BenchError(f"--output {folder}: cannot be written ({error.strerror}); give another folder") from error
    write_curve(folder / "tune", computed, read, costs, advice, source)


def _show(
    console: Console, costs: tuple[Compute, Read], advice: Advice, habits: Habits, room: Capacity, folder: Path
) -> None:
    compute, read = costs
    square = f"{compute.per_square_s * 1e9:,.2f} ns a token squared"
    each = f"{read.fixed_s * 1e3:,.1f} ms a read"
    lines = [
        f"Computing: {compute.per_token_s * 1e6:,.1f} us a token, {square}, {compute.fixed_s * 1e3:,.1f} ms a step",
        f"Reading: {read.bytes_per_s / 1e9:,.2f} GB/s, {read.bytes_per_token:,.0f} bytes a token, {each}",
        f"Decode engine: {room.tokens:,} tokens; leases may hold {advice.held} of {habits.conversations} conversations",
    ]
    if advice.kv_recompute_threshold is None:
        lines.append("Reading never pays here: leave reuse off (--reuse off), or find out why transfers are so slow.")
    elif advice.wanted > advice.retention_budget:
        lines.append("Not all of them fit: the least recently renewed give way, and their next turn recomputes.")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print_json(json.dumps(_settings(advice)))
    console.print(f"Curve and figures: {folder}", highlight=False, soft_wrap=True)


def _settings(advice: Advice) -> dict[str, Any]:
    return {
        "kv_connector_extra_config": {
            "kv_recompute_threshold": advice.kv_recompute_threshold,
            "lease_ttl_s": advice.lease_ttl_s,
            "decoder_kv_blocks_ttl": advice.decoder_kv_blocks_ttl,
            "retention_budget": advice.retention_budget,
        },
        "router conversations": {
            "lease_ttl_s": advice.lease_ttl_s,
            "decoder_kv_blocks_ttl_s": advice.decoder_kv_blocks_ttl,
            "keep_s": advice.keep_s,
            "keep_max_s": advice.decoder_kv_blocks_ttl,
        },
    }
