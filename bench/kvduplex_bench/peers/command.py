"""``kvduplex bench peers``."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from kvduplex_bench.console import explain, result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn import stage as stages
from kvduplex_bench.multiturn.corpus import Corpus
from kvduplex_bench.multiturn.player import Conversation, Player, Turn
from kvduplex_bench.multiturn.target import Client, Served
from kvduplex_bench.multiturn.workload import Arm, Workload
from kvduplex_bench.peers.clients import Task, run_aiperf, run_vllm
from kvduplex_bench.peers.observed import METRICS, Agreement, Observed, agreement

__all__ = ["peers"]

_MAX_MODEL_LEN: Final = 32_768


@dataclass(frozen=True, slots=True)
class _Peer:
    """Another client: its name, how it is run, and how many turns it can play."""

    name: str
    run: Callable[[Task], list[Observed]]
    turns: int


def peers(
    url: Annotated[str, typer.Option(help="Router of a running cluster.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Folder of the model's tokenizer, with --url.")] = "",
    serve: Annotated[str, typer.Option(help="cpu: start everything on this machine instead.")] = "",
    size: Annotated[str, typer.Option(help="With --serve: size of the generated model.")] = "20m",
    aiperf: Annotated[str, typer.Option(help="The aiperf program, in an environment of its own.")] = "",
    vllm: Annotated[bool, typer.Option(help="Compare with vllm bench serve.")] = True,
    tokens: Annotated[int, typer.Option(min=16, help="Length of a conversation's first message.")] = 1_500,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Length of an answer.")] = 48,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations a round.")] = 4,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; the clients take turns in each.")] = 3,
    seed: Annotated[int, typer.Option(help="Of all texts.")] = 0,
) -> None:
    """Send equal workloads through this benchmark and through other clients, in turns, and compare what they saw."""
    console = result_console()
    try:
        with _cluster(url, tokenizer, serve, size) as (found, folder):
            others = [_Peer("vllm bench serve", run_vllm, 1)] if vllm else []
            if aiperf:
                program = shutil.which(aiperf) or aiperf
                others.append(_Peer("aiperf", lambda task: run_aiperf(task, program), 2))
            served = asyncio.run(Client(found, option="--url", headers={}, timeout_s=600).served(None))
            play = _Play(found, folder, served, tokens, answer_tokens, conversations, seed)
            for peer in others:
                _show(console, peer, play.compare(peer, rounds))
    except BenchError as error:
        explain("bench peers", error)
        raise typer.Exit(1) from error


class _Play:
    """Gives both clients workloads of one kind, each with texts of its own so that no cache knows them."""

    def __init__(
        self, url: str, tokenizer: str, served: Served, tokens: int, answer_tokens: int, conversations: int, seed: int
    ) -> None:
        self._url, self._tokenizer, self._served = url, tokenizer, served
        self._tokens, self._answer_tokens, self._conversations = tokens, answer_tokens, conversations
        self._corpus = Corpus(seed, served.tokens_per_word)

    def compare(self, peer: _Peer, rounds: int) -> list[Agreement]:
        """Alternate with `peer`; the client that begins changes from round to round."""
        ours: list[list[Observed]] = []
        theirs: list[list[Observed]] = []
        self._ours(peer, "warm-up")
        for number in range(rounds):
            steps = [lambda n=number: ours.append(self._ours(peer, f"ours-{n}"))]
            steps.append(lambda n=number: theirs.append(self._theirs(peer, f"theirs-{n}")))
            for step in steps if number % 2 == 0 else reversed(steps):
                step()
        return [agreement(metric, ours, theirs) for metric in METRICS]

    def _texts(self, peer: _Peer, key: str) -> list[list[str]]:
        sizes = [self._tokens, *[self._tokens // 10] * (peer.turns - 1)]
        return [
            [self._corpus.text(f"{peer.name}/{key}/{number}/{turn}", size) for turn, size in enumerate(sizes)]
            for number in range(self._conversations)
        ]

    def _theirs(self, peer: _Peer, key: str) -> list[Observed]:
        with tempfile.TemporaryDirectory(prefix="kvduplex-peer-") as folder:
            task = Task(
                self._url, self._served.name, self._tokenizer, self._texts(peer, key), self._answer_tokens, Path(folder)
            )
            try:
                return peer.run(task)
            except BenchError as error:
                logs = "".join(path.read_text()[-2000:] for path in Path(folder).glob("*.log"))
                raise BenchError(f"{error}\n{logs}") from error

    def _ours(self, peer: _Peer, key: str) -> list[Observed]:
        turns: list[Turn] = []
        for number, texts in enumerate(self._texts(peer, key)):
            asyncio.run(self._one(f"{peer.name}/{key}/{number}", texts, turns))
        if failed := [turn.error for turn in turns if turn.reply is None]:
            raise BenchError(failed[0])
        counted = [turn.reply for turn in turns if turn.turn == peer.turns - 1]
        return [Observed(r.ttft_s, fmean(r.gaps_s), r.e2e_s) for r in counted if r is not None]

    async def _one(self, key: str, texts: Sequence[str], turns: list[Turn]) -> None:
        workload = Workload(
            conversations=1, active=1, clients=1, turns=max(2, len(texts)), answer_tokens=self._answer_tokens
        )
        player = Player(
            workload=workload,
            client=Client(self._url, option="--url", headers={}, timeout_s=600),
            corpus=_Given(dict(enumerate(texts))),
            model=self._served.name,
            fresh_ids=False,
            told=turns.append,
        )
        await player.play([Conversation(key, "")], range(len(texts)))


class _Given(Corpus):
    """Texts that are given by turn instead of generated."""

    def __init__(self, texts: dict[int, str]) -> None:
        super().__init__(0, 1.0)
        self._texts = texts

    def text(self, key: str, tokens: int) -> str:
        """The text of the turn that `key` ends with."""
        del tokens
        return self._texts[int(key.rpartition("/")[2])]


@contextmanager
def _cluster(url: str, tokenizer: str, serve: str, size: str) -> Iterator[tuple[str, str]]:
    if serve not in {"", "cpu"}:
        raise BenchError(f"--serve {serve}: only cpu can be started here; give --url and --tokenizer")
    if serve:
        folder = stages.generated_model(size)
        stage = stages.CpuStage(folder, _MAX_MODEL_LEN, 1.0, min(2, len(os.sched_getaffinity(0))))
        with stages.staged(stage, stages.Setting("leased", prefill_cache=False), [Arm.ON]) as (target, _):
            yield target.routers[Arm.ON], folder
        return
    if not url or not tokenizer:
        raise BenchError("give --url of a running router and --tokenizer, the folder of its model; or --serve cpu")
    yield url, tokenizer


def _show(console: Console, peer: _Peer, found: Sequence[Agreement]) -> None:
    what = "single turns" if peer.turns == 1 else "second turns of conversations"
    table = Table(title=f"{peer.name}, {what}, one at a time")
    for heading in ("metric", "ours (ms)", "theirs (ms)", "theirs/ours", "noise of ours", ""):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for one in found:
        values = (f"{one.ours_s * 1e3:,.1f}", f"{one.theirs_s * 1e3:,.1f}", f"{one.ratio:.3f}", f"{one.noise:.1%}")
        table.add_row(one.metric.removesuffix("_s").upper(), *values, one.verdict)
    console.print(table)
