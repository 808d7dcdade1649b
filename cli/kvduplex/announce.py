"""What a ready cluster tells: one JSON line for programs, or addresses and examples for people."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvduplex.supervise import Unit

__all__ = ["Cluster", "curl_example", "openai_example", "ready_json", "ready_text"]

_QUESTION = "Tell me a long story about a river and an island."
_FOLLOW_UP = "Go on, please."
_ANSWER_TOKENS = 200  # a first answer must exceed the recompute threshold for its KV to be worth moving


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is announced.

    Attributes:
        engines: Engine units.
        roles: Role of each engine by unit name.
        router: Router unit; None when it runs elsewhere.
        model: Name that requests give.
        logs: Folder of log files.
    """

    engines: Sequence[Unit]
    roles: Mapping[str, str]
    router: Unit | None
    model: str
    logs: Path


def ready_json(cluster: Cluster, pids: Mapping[str, int], *, seconds: float) -> str:
    """The readiness line: an object on one line.

    Args:
        cluster: What runs.
        pids: Process id by unit name.
        seconds: How long the start took.
    """
    described = {unit.name: _described(unit, pids) for unit in _units(cluster)}
    engines = [{**described[unit.name], "role": cluster.roles[unit.name]} for unit in cluster.engines]
    ready = {
        "event": "ready",
        "url": cluster.router.url if cluster.router else None,
        "model": cluster.model,
        "pid": os.getpid(),
        "seconds": round(seconds, 1),
        "logs": str(cluster.logs),
        "router": described[cluster.router.name] if cluster.router else None,
        "engines": engines,
    }
    return json.dumps(ready)


def ready_text(cluster: Cluster, *, seconds: float) -> str:
    """Addresses, logs, two examples, and how to stop."""
    lines = [f"Ready after {seconds:.0f} s. Model: {cluster.model}", ""]
    lines += [f"  {unit.name:<12}{unit.url}" for unit in reversed(_units(cluster))]
    lines += [f"  {'logs':<12}{cluster.logs}"]
    if cluster.router:
        lines += _examples(cluster, cluster.router)
    return "\n".join([*lines, "", "Press Ctrl-C to stop."])


def curl_example(url: str, model: str) -> str:
    """Two turns of one conversation for a shell with curl and python3."""
    first = json.dumps({"role": "user", "content": _QUESTION})
    second = json.dumps({"role": "user", "content": _FOLLOW_UP})
    start = json.dumps({"model": model, "conversation_id": "demo", "temperature": 0, "max_tokens": _ANSWER_TOKENS})
    body = f'{start[:-1]}, "messages": [\'"$1"\']}}'
    pick = 'import json,sys; m=json.load(sys.stdin)["choices"][0]["message"]; '
    pick += 'print(json.dumps({"role": m["role"], "content": m["content"]}))'
    return "\n".join(
        [
            f"ask() {{ curl -s {shlex.quote(f'{url}/v1/chat/completions')} -H 'Content-Type: application/json' \\",
            f"  -d '{body}' | python3 -c {shlex.quote(pick)}; }}",
            f"q={shlex.quote(first)}",
            'a=$(ask "$q"); echo "$a"',
            f'ask "$q, $a, "{shlex.quote(second)}',
        ]
    )


def openai_example(url: str, model: str) -> str:
    """The same with the openai package."""
    return "\n".join(
        [
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{url}/v1", api_key="none")',
            f"messages = [{{'role': 'user', 'content': {_QUESTION!r}}}]",
            f"for question in ({_FOLLOW_UP!r}, None):",
            "    reply = client.chat.completions.create(",
            f"        model={model!r}, messages=messages, max_tokens={_ANSWER_TOKENS}, temperature=0,",
            "        extra_body={'conversation_id': 'demo-openai'})",
            "    answer = reply.choices[0].message.content",
            "    print(answer)",
            "    messages += [{'role': 'assistant', 'content': answer}, {'role': 'user', 'content': question}]",
        ]
    )


def _examples(cluster: Cluster, router: Unit) -> list[str]:
    prefill = next((unit for unit in cluster.engines if cluster.roles[unit.name] == "prefill"), None)
    lines = ["", "Two turns with curl; the second turn's KV comes from the decode engine:", ""]
    lines += _indented(curl_example(router.url, cluster.model))
    if prefill is not None:
        lines += _indented(f"curl -s {prefill.url}/metrics | grep external_kv_transfer  # tokens that came that way")
    lines += ["", "The same with openai-python:", "", *_indented(openai_example(router.url, cluster.model))]
    return lines


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _units(cluster: Cluster) -> list[Unit]:
    return [*cluster.engines, *([cluster.router] if cluster.router else [])]


def _described(unit: Unit, pids: Mapping[str, int]) -> dict[str, object]:
    return {
        "name": unit.name,
        "kind": unit.kind,
        "url": unit.url,
        "pid": pids.get(unit.name),
        "ports": dict(unit.ports),
        "log": str(unit.log),
    }
