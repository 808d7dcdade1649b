"""The clusters of ``--serve cpu``: engines in one setting, its router, and a second router that hands nothing back."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvduplex_bench.cluster import Cluster, free_ports, started
from kvduplex_bench.errors import BenchError, ClusterError
from kvduplex_bench.multiturn.engines import Engines
from kvduplex_bench.multiturn.target import Target
from kvduplex_bench.multiturn.workload import Arm

__all__ = ["CpuStage", "Setting", "bandwidth", "generated_model", "staged"]

_START_S: Final = 600.0
_ROUTER_S: Final = 60.0
_STOP_S: Final = 10.0
_MODEL_S: Final = 300.0
_READS: Final = 9


@dataclass(frozen=True, slots=True)
class Setting:
    """How the engines of a cluster run.

    Attributes:
        connector: ``leased`` or ``stock``.
        prefill_cache: Whether prefill engines keep a prefix cache.
    """

    connector: str
    prefill_cache: bool

    @property
    def name(self) -> str:
        """For people, and in the record."""
        return f"{self.connector}, prefill cache {'on' if self.prefill_cache else 'off'}"

    def arms(self, wanted: Sequence[Arm]) -> list[Arm]:
        """Those of `wanted` that this setting can play: ``floor`` is the prefill engine's cache."""
        return [arm for arm in wanted if self.prefill_cache or arm is not Arm.FLOOR]


@dataclass(frozen=True, slots=True)
class CpuStage:
    """What all clusters of a run have in common.

    Attributes:
        model: Folder of the model.
        max_model_len: Longest context in tokens.
        kv_gib: KV cache of each engine in GiB.
        cores: Cores a prefill engine computes on. A decode engine computes on one: a step of one token is too short to
            be worth a team, and with one client the two take turns, so they may share it.
    """

    model: str
    max_model_len: int
    kv_gib: float
    cores: int

    def arguments(self, setting: Setting, port: int, port_offset: int) -> list[str]:
        """Of ``kvduplex serve cpu``."""
        cache = "--prefill-prefix-cache" if setting.prefill_cache else "--no-prefill-prefix-cache"
        values = {
            "--port": port,
            "--port-offset": port_offset,
            "--model": self.model,
            "--connector": setting.connector,
            "--max-model-len": self.max_model_len,
            "--kv-space": self.kv_gib,
            "--cores-per-engine": self.cores,
            "--set": "decode.cores_per_engine=1",
        }
        return [cache, *(str(part) for pair in values.items() for part in pair)]


def generated_model(size: str) -> str:
    """Folder of a generated model, made when it is not there.

    Raises:
        BenchError: It cannot be made; the command has said why.
    """
    command = [sys.executable, "-m", "kvduplex", "model", "make", "--size", size]
    try:
        made = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_MODEL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"--size {size}: the model was not generated within {_MODEL_S:.0f} s") from error
    if made.returncode:
        raise BenchError(f"--size {size}: the model could not be generated; see above")
    return made.stdout.strip().splitlines()[-1]


@contextlib.contextmanager
def staged(stage: CpuStage, setting: Setting, arms: Sequence[Arm]) -> Iterator[tuple[Target, dict[str, Any]]]:
    """Run a cluster in `setting` for the length of the block; gives it and what it said when it was ready.

    Raises:
        ClusterError: It did not start, or a router in front of it did not.
    """
    port, off_port, continue_port = free_ports(3)
    with contextlib.ExitStack() as stack:
        arguments = stage.arguments(setting, port, _offset(port))
        cluster = stack.enter_context(started(arguments, _START_S))
        off = stack.enter_context(_router(_router_arguments(cluster, off_port, ["--reuse", "off"]), off_port))
        routers = {Arm.ON: cluster.url, Arm.OFF: off, Arm.FLOOR: off}
        if Arm.CONTINUE in arms:
            going_on = _router_arguments(cluster, continue_port, ["--config", str(_continuing(stack, stage.model))])
            routers[Arm.CONTINUE] = stack.enter_context(_router(going_on, continue_port))
        yield _target(cluster, setting, routers), _about(cluster, arguments)


def _continuing(stack: contextlib.ExitStack, model: str) -> Path:
    """Configuration of a router that lets the decode engine go on whenever it holds the history.

    Plans are priced by exact token counts, so the router needs the model's tokenizer.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvduplex-bench-")))
    path = folder / "router.yaml"
    path.write_text(json.dumps({"routing": {"plans": ["continue", "recompute"], "tokenizer": model}}))
    return path


def _about(cluster: Cluster, arguments: Sequence[str]) -> dict[str, Any]:
    """What to keep of a cluster: nothing that names this machine's folders, processes or ports."""
    engines = [{"name": engine["name"], "role": engine["role"]} for engine in cluster.ready["engines"]]
    shown = [Path(part).name if part.startswith("/") else part for part in arguments]
    return {"start_s": cluster.ready["seconds"], "model": cluster.ready["model"], "engines": engines, "serve": shown}


def _offset(port: int) -> int:
    """Engine ports of our own, so that a cluster that is served already is not in the way."""
    return 10_000 + port % 10_000


def _target(cluster: Cluster, setting: Setting, routers: dict[Arm, str]) -> Target:
    engines = Engines(cluster.prefill, cluster.decode)
    # Asked without transfer parameters, a prefill engine without a cache computes everything itself.
    reference = None if setting.prefill_cache else cluster.prefill[0]
    return Target(setting.name, routers, engines, reference=reference)


def _router_arguments(cluster: Cluster, port: int, more: Sequence[str]) -> list[str]:
    engines = [part for url in cluster.prefill for part in ("--prefill", url)]
    for engine in cluster.ready["engines"]:
        if engine["role"] == "decode":
            lease = engine["ports"].get("lease")
            engines += ["--decode", engine["url"] + (f"#lease=127.0.0.1:{lease}" if lease else "")]
    return ["--listen", f"127.0.0.1:{port}", *engines, *more]


@contextlib.contextmanager
def _router(arguments: Sequence[str], port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "kvduplex", "router", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            _wait_ready(url, process)
            yield url
        finally:
            _end(process)


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _ROUTER_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ClusterError(
                f"the second router ended with status {process.returncode} before it was ready; see above"
            )
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):  # noqa: S310 - our own router
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ClusterError(f"the second router was not ready within {_ROUTER_S:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def bandwidth(piece_bytes: int, pieces: Sequence[int]) -> str:
    """Reads of so many pieces over loopback, as ``kvduplex bench transfer --json`` prints them.

    Raises:
        BenchError: They could not be made.
    """
    command = [sys.executable, "-m", "kvduplex", "bench", "transfer", "--json", "--repeats", str(_READS)]
    command += ["--block-bytes", str(piece_bytes), "--blocks", ",".join(map(str, pieces))]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_MODEL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"the transfer bandwidth was not measured within {_MODEL_S:.0f} s") from error
    if done.returncode:
        raise BenchError("the transfer bandwidth could not be measured; see above")
    return done.stdout
