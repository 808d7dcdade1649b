"""Runs other benchmark clients and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from kvduplex_bench.errors import BenchError
from kvduplex_bench.peers.observed import Observed

__all__ = ["Task", "read_aiperf", "read_vllm", "run_aiperf", "run_vllm"]

_WITHIN_S: Final = 900.0
_QUIET: Final = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class Task:
    """A set of conversations for another client.

    Attributes:
        url: Of the router.
        model: Name of the model.
        tokenizer: Folder of its tokenizer; both clients load it.
        conversations: The user's messages of each, one a turn.
        answer_tokens: Length of every answer.
        folder: Where inputs and outputs go.
    """

    url: str
    model: str
    tokenizer: str
    conversations: Sequence[Sequence[str]]
    answer_tokens: int
    folder: Path


def run_vllm(task: Task) -> list[Observed]:
    """``vllm bench serve``, one request at a time. It knows no further turns: each first message is a request.

    Raises:
        BenchError: It failed, or wrote something else.
    """
    rows = [{"prompt": one[0], "output_tokens": task.answer_tokens} for one in task.conversations]
    _write_lines(task.folder / "prompts.jsonl", rows)
    flags = {
        "--backend": "openai-chat",
        "--endpoint": "/v1/chat/completions",
        "--base-url": task.url,
        "--model": task.model,
        "--tokenizer": task.tokenizer,
        "--dataset-name": "custom",
        "--dataset-path": task.folder / "prompts.jsonl",
        "--custom-output-len": task.answer_tokens,
        "--num-prompts": len(rows),
        "--max-concurrency": 1,
        "--temperature": 0,
        "--result-dir": task.folder,
        "--result-filename": "result.json",
        "--ready-check-timeout-sec": 0,
    }
    switches = ["--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--save-result", "--save-detailed"]
    command = [sys.executable, "-m", "kvduplex_bench.peers.vllm_main", *_flat(flags), *switches, "--disable-tqdm"]
    _run(command, "vllm bench serve", task.folder)
    return read_vllm(task.folder / "result.json")


def read_vllm(path: Path) -> list[Observed]:
    """Requests of a result that ``--save-detailed`` wrote.

    Raises:
        BenchError: It is no such file.
    """
    try:
        value = json.loads(path.read_text())
        ttfts, gaps = value["ttfts"], value["itls"]
        return [
            Observed(ttft, fmean(some), ttft + sum(some))
            for ttft, some in zip(ttfts, gaps, strict=True)
            if ttft and some
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a detailed result of vllm bench serve ({error!r})") from error


def run_aiperf(task: Task, program: str) -> list[Observed]:
    """``aiperf profile``, one conversation at a time, as many turns as it has.

    Raises:
        BenchError: It is not there, failed, or wrote something else.
    """
    rows = [
        {"session_id": f"{task.folder.name}-{number}", "turns": [{"text": text} for text in texts]}
        for number, texts in enumerate(task.conversations)
    ]
    _write_lines(task.folder / "conversations.jsonl", rows)
    extra = {"max_tokens": task.answer_tokens, "ignore_eos": True, "temperature": 0}
    flags = {
        "--model": task.model,
        "--tokenizer": task.tokenizer,
        "--url": task.url,
        "--endpoint-type": "chat",
        "--input-file": task.folder / "conversations.jsonl",
        "--custom-dataset-type": "multi_turn",
        "--session-header": "X-Conversation-ID",
        "--concurrency": 1,
        "--conversation-num": len(rows),
        "--extra-inputs": json.dumps(extra),
        "--artifact-dir": task.folder / "aiperf",
        "--export-level": "records",
        "--ui": "none",
    }
    _run([program, "profile", "--streaming", "--use-server-token-count", *_flat(flags)], "aiperf", task.folder)
    found = sorted((task.folder / "aiperf").rglob("profile_export.jsonl"))
    if not found:
        raise BenchError(f"aiperf wrote no profile_export.jsonl below {task.folder}; see {task.folder}/aiperf.log")
    return read_aiperf(found[0])


def read_aiperf(path: Path) -> list[Observed]:
    """Requests of a record export, further turns only where conversations have some.

    Raises:
        BenchError: It is no such file.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line]
        turns = {int(row["metadata"].get("turn_index") or 0) for row in rows}
        kept = [row for row in rows if not row.get("error") and _turn(row) > 0] if max(turns) else rows
        return [_of_aiperf(row["metrics"]) for row in kept]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a record export of aiperf ({error!r})") from error


def _turn(row: dict[str, Any]) -> int:
    return int(row["metadata"].get("turn_index") or 0)


def _of_aiperf(metrics: dict[str, Any]) -> Observed:
    names = ("time_to_first_token", "inter_token_latency", "request_latency")
    return Observed(*(float(metrics[name]["value"]) / 1e3 for name in names))


def _run(command: list[str], name: str, folder: Path) -> None:
    log = folder / f"{Path(command[0]).name if name == 'aiperf' else 'vllm'}.log"
    try:
        with log.open("w") as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, timeout=_WITHIN_S, check=False, env={**os.environ, **_QUIET}
            )
    except FileNotFoundError as error:
        raise BenchError(f"{command[0]}: no such program; install {name} in an environment of its own") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{name} did not end within {_WITHIN_S:.0f} s; see {log}") from error
    if done.returncode:
        raise BenchError(f"{name} ended with status {done.returncode}; see {log}")


def _flat(flags: dict[str, Any]) -> list[str]:
    return [str(part) for pair in flags.items() for part in pair]


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
