"""``kvduplex bench multiturn``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console

from kvduplex_bench.console import result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.acts import (
    arms_named,
    cpu_stage,
    found_act,
    must_be_alone,
    names,
    numbers,
    own_acts,
    routers_of,
    setting_of,
    urls,
)
from kvduplex_bench.multiturn.campaign import Campaign
from kvduplex_bench.multiturn.engines import Engines
from kvduplex_bench.multiturn.journal import Journal
from kvduplex_bench.multiturn.progress import reporting
from kvduplex_bench.multiturn.provenance import provenance
from kvduplex_bench.multiturn.results import load
from kvduplex_bench.multiturn.table import show
from kvduplex_bench.multiturn.workload import CPU, PUBLISHED, QUICK, Workload
from kvduplex_bench.report.files import write_report

__all__ = ["DEFAULT_OUTPUT", "multiturn"]

DEFAULT_OUTPUT: Final = Path(".bench/multiturn.jsonl")
_INTERRUPTED: Final = 130
_PRESETS: Final = {"published": PUBLISHED, "cpu": CPU, "quick": QUICK}


class _Preset(StrEnum):
    """Workloads by name."""

    PUBLISHED = "published"
    CPU = "cpu"
    QUICK = "quick"


class _Serve(StrEnum):
    """Clusters that the benchmark starts itself."""

    CPU = "cpu"


def multiturn(
    url: Annotated[str, typer.Option(help="Router of a running cluster.")] = "",
    off_url: Annotated[str, typer.Option(help="Router with reuse off over the same engines, for the arm off.")] = "",
    continue_url: Annotated[str, typer.Option(help="Router that continues on the decode engine, for that arm.")] = "",
    prefill: Annotated[list[str] | None, typer.Option(help="Prefill engine whose metrics to read; repeatable.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="Decode engine whose metrics to read; repeatable.")] = None,
    reference: Annotated[str, typer.Option(help="Plain engine of the same model, to compare answers with.")] = "",
    setting: Annotated[str, typer.Option(help="Name of the cluster in the results, with --url.")] = "",
    serve: Annotated[_Serve | None, typer.Option(help="Start everything on this machine instead.")] = None,
    connector: Annotated[str, typer.Option(help="With --serve: leased, stock, or both with a comma.")] = "leased",
    prefill_cache: Annotated[str, typer.Option(help="With --serve: off, on, or both with a comma.")] = "off,on",
    size: Annotated[str, typer.Option(help="With --serve: size of the generated model.")] = "20m",
    kv_space: Annotated[float, typer.Option(min=0.05, help="With --serve: KV cache of an engine in GiB.")] = 1.0,
    cores: Annotated[int, typer.Option(min=1, help="With --serve: cores a prefill engine computes on.")] = 2,
    arms: Annotated[str, typer.Option(help="off, on, continue, floor; with commas.")] = "",
    preset: Annotated[_Preset | None, typer.Option(help="Workload; cpu with --serve, else published.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short for --preset quick: whether all of it works.")] = False,
    conversations: Annotated[int | None, typer.Option(help="Conversations a segment.")] = None,
    turns: Annotated[int | None, typer.Option(help="Turns a conversation.")] = None,
    user_tokens: Annotated[int | None, typer.Option(help="Tokens of a user's message.")] = None,
    answer_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer.")] = None,
    prefixes: Annotated[str, typer.Option(help="Lengths of the constant prefix in tokens, with commas.")] = "",
    clients: Annotated[int | None, typer.Option(help="Requests in flight at most.")] = None,
    active: Annotated[int | None, typer.Option(help="Open conversations at most.")] = None,
    warm_up: Annotated[float | None, typer.Option(help="Share of the turns that is not counted.")] = None,
    think_time: Annotated[float | None, typer.Option(help="Seconds a client waits before the next turn.")] = None,
    shared_prefix: Annotated[bool | None, typer.Option(help="One prefix for all conversations of a point.")] = None,
    explicit_ids: Annotated[bool | None, typer.Option(help="Send conversation_id; else be recognised.")] = None,
    repeats: Annotated[int | None, typer.Option(help="How often all of it is played.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of all texts.")] = None,
    model: Annotated[str, typer.Option(help="Model, when the router serves several.")] = "",
    api_key_env: Annotated[str, typer.Option(help="Variable that holds the router's API key.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a request may take.")] = 600,
    check: Annotated[bool, typer.Option(help="Compare answers with a plain engine.")] = True,
    report: Annotated[bool, typer.Option("--report", help="Draw the figures and the page as well.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Results, as JSON lines; a stopped run goes on there. Default: in .bench/.")
    ] = None,
) -> None:
    """Play multi-turn conversations with and without reuse, and time them where clients are."""
    console = Console(stderr=True)
    try:
        knobs = {
            "conversations": conversations,
            "turns": turns,
            "user_tokens": user_tokens,
            "answer_tokens": answer_tokens,
            "prefixes": numbers(prefixes) or None,
            "clients": clients,
            "active": active,
            "warm_up": warm_up,
            "think_s": think_time,
            "shared_prefix": shared_prefix,
            "explicit_ids": explicit_ids,
            "repeats": repeats,
            "seed": seed,
        }
        usual = _Preset.QUICK if quick else _Preset.CPU if serve else _Preset.PUBLISHED
        workload = _workload(preset or usual, knobs)
        wanted = arms_named(arms)
        if serve:
            must_be_alone("--serve", url, off_url, continue_url, prefill, decode, reference)
            settings = [setting_of(one, cache) for one in names(connector) for cache in names(prefill_cache)]
            acts = own_acts(settings, wanted, cpu_stage(workload, size, kv_space, cores))
            details: dict[str, Any] = {"serve": "cpu", "size": size, "kv_gib": kv_space, "prefill_cores": cores}
        else:
            routers = routers_of(url, off_url, continue_url)
            engines = Engines(urls("--prefill", prefill), urls("--decode", decode))
            acts = [found_act(setting, wanted, routers, engines, reference, fresh_ids=not off_url)]
            details = {"url": url}
        campaign = Campaign(
            workload=workload,
            acts=acts,
            model=model or None,
            headers=_headers(api_key_env),
            timeout_s=timeout,
            check=check,
            details=details,
        )
        record = output or DEFAULT_OUTPUT.with_stem("quick" if quick else DEFAULT_OUTPUT.stem)
        _run(campaign, record, console)
        _conclude(record, console, report=report)
    except BenchError as error:
        _complain(console, error)


def _run(campaign: Campaign, output: Path, console: Console) -> None:
    journal = Journal.open(output, fingerprint=campaign.fingerprint)
    keys = campaign.keys
    done = len(journal.done & set(keys))
    if done:
        console.print(
            f"{output}: {done} of {len(keys)} segments are there already; going on.", highlight=False, soft_wrap=True
        )
    try:
        with _stoppable(), reporting(console, total=len(keys), done=done) as reporter:
            if done < len(keys):
                campaign.run(journal, reporter, provenance(sys.argv[1:]))
    except KeyboardInterrupt:
        left = len(set(keys) - journal.done)
        console.print(
            f"Interrupted: {len(keys) - left} of {len(keys)} segments are in {output}, marked partial. "
            "The same command goes on.",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        journal.close()


def _conclude(output: Path, console: Console, *, report: bool) -> None:
    results = load(output)
    show(results, result_console())
    drawn = write_report(results, output.with_suffix(""))[0] if report else f"kvduplex bench plot {output}"
    console.print(f"Results: {output}. Figures: {drawn}", highlight=False, soft_wrap=True)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, so that a supervisor's stop keeps the record in order."""

    def stop(number: int, frame: object) -> NoReturn:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _workload(preset: _Preset, knobs: Mapping[str, Any]) -> Workload:
    base = _PRESETS[preset]
    given = {name: value for name, value in knobs.items() if value is not None}
    unknown = given.keys() - {one.name for one in fields(Workload)}
    assert not unknown, unknown  # noqa: S101 - options and knobs are named in this file
    return replace(base, **given)


def _headers(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    if not (key := os.environ.get(variable)):
        raise BenchError(f"--api-key-env {variable}: that variable is not set")
    return {"authorization": f"Bearer {key}"}


def _complain(console: Console, error: BenchError) -> NoReturn:
    console.print(
        f"[red]bench multiturn:[/red] {str(error).replace('[', chr(92) + '[')}", highlight=False, soft_wrap=True
    )
    raise typer.Exit(1) from error
