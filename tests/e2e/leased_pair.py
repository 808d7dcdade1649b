"""One prefill and one decode engine without a router, each of which can be killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvduplex.folders import Folders
from kvduplex.supervise.affinity import confine
from kvduplex.tinymodel import SIZES, ensure_model
from kvduplex_bench.cluster import free_ports
from kvduplex_bench.scrape import Reading, scrape
from kvduplex_transfer.host import HostBackend
from kvduplex_transfer.interface import EnginePlan, Role

START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Recipe:
    """What `HostBackend` reads; the same options for both roles but for their ports."""

    model: str
    by_role: Mapping[Role, Mapping[str, Any]]
    name: str = "pair"

    def options(self, role: Role) -> Mapping[str, Any]:
        return self.by_role[role]


class EngineError(Exception):
    """An engine answered with an error; `status` is HTTP's, 0 when there was no answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


@dataclass
class Engine:
    """One engine process and its log."""

    plan: EnginePlan
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        # Logprobs would be compiled on first use, which takes a C++ compiler most of a minute on a busy core.
        environment = {**os.environ, **self.plan.environment, "TORCHDYNAMO_DISABLE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.plan.argv, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"{self.plan.name} ended while starting:\n{self.tail()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.plan.url}/health", timeout=5):
                confine(self.process.pid, {int(core) for core in self.plan.environment["GOMP_CPU_AFFINITY"].split()})
                return
            time.sleep(0.25)
        raise AssertionError(f"{self.plan.name} was not ready within {START_TIMEOUT_S:.0f} s:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL to the whole group, as when a host dies."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def metrics(self) -> Reading:
        return scrape(self.plan.url)

    def chat(self, messages: list[dict[str, Any]], timeout_s: float = 60.0, **fields: Any) -> dict[str, Any]:
        """One greedy chat completion with token ids and logprobs, whole."""
        body = {
            "model": "pair",
            "messages": messages,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": True,
            "top_logprobs": 2,
            **{key: value for key, value in fields.items() if value is not None},
        }
        return self.post("/v1/chat/completions", body, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 60.0) -> dict[str, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.plan.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            raise EngineError(error.code, error.read().decode(errors="replace")) from error
        except OSError as error:
            raise EngineError(0, str(error)) from error
        answer: dict[str, Any] = json.loads(text) if text else {}
        return answer

    def _end(self, number: int) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(15)
        self.process = None


@dataclass
class Pair:
    """A prefill and a decode engine."""

    prefill: Engine
    decode: Engine

    @property
    def lease_endpoint(self) -> str:
        endpoint = self.decode.plan.lease_endpoint
        assert endpoint is not None
        return endpoint


def tiny_model() -> Path:
    """Folder of the model the project generates; made on first use."""
    cache = Folders.from_environ(os.environ, home=Path.home(), uid=os.getuid()).cache
    return ensure_model(SIZES["tiny"], cache, report=lambda _: None)


@contextlib.contextmanager
def started(
    model: Path,
    logs: Path,
    *,
    connector: str = "leased",
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
) -> Iterator[Pair]:
    """Start both engines at once and end them with the block."""
    ports = iter(free_ports(6))

    def options(extra: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "served_model_name": "pair",
            "connector": connector,
            "http_port": next(ports),
            "side_channel_port": next(ports),
            "lease_port": next(ports),
            "max_model_len": 4096,
            "kv_space_gib": 0.5,
            **(extra or {}),
        }

    recipe = Recipe(str(model), {Role.PREFILL: options(prefill), Role.DECODE: options(decode)})
    backend = HostBackend()
    engines = [Engine(backend.engine_plan(recipe, role), logs / f"{role}.log") for role in (Role.PREFILL, Role.DECODE)]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.await_ready()
        yield Pair(*engines)
    finally:
        for engine in engines:
            engine.stop()
