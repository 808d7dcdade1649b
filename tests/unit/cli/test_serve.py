"""``kvduplex serve cpu``: from options to exact commands, and from a start to an end with small real programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.unit.cli.conftest import SERVER, Marked

from kvduplex import dryrun
from kvduplex.announce import Cluster, curl_example, openai_example, ready_text
from kvduplex.cpu_cluster import CpuCluster, Where, parse_settings, plan_cluster
from kvduplex.errors import EngineFailedError, PreflightError, UsageError
from kvduplex.launch import Output, launch
from kvduplex.locks import file_lock
from kvduplex.supervise import Unit, UnitKind
from kvduplex.tinymodel import SIZES
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.host import HostBackend
from kvduplex_transfer.interface import Finding, Role, Severity

GOLDEN = Path(__file__).parent / "golden"
TINY = (SIZES["tiny"], Path("/cache/models/qwen3-tiny-v1"))
WHERE = Where(host="127.0.0.1", port=8000, logs=Path("/logs"), scratch=Path("/run/kvduplex/8000"), cache=Path("/cache"))
OPTIONS = {UnitKind.ENGINE: "--port-offset 1000", UnitKind.ROUTER: "--port 8001"}
Start = Callable[..., subprocess.Popen[str]]
SERVE = f"{SERVER}\nserver.serve_forever()"


def planned(where: Where = WHERE, **wishes: Any) -> Cluster:
    backend = HostBackend(cores=(0, 1), interpreter="/venv/bin/python")
    values: dict[str, Any] = {"model": None, "generated": TINY, **wishes}
    return plan_cluster(CpuCluster(**values), backend, where, interpreter="/venv/bin/python")


def units(cluster: Cluster) -> list[Unit]:
    assert cluster.router is not None
    return [*cluster.engines, cluster.router]


def flag(unit: Unit, name: str) -> str:
    return unit.argv[unit.argv.index(name) + 1]


@pytest.mark.parametrize(
    ("name", "wishes"),
    [
        ("serve_cpu_stock.txt", {"connector": ConnectorKind.STOCK}),
        ("serve_cpu_2p3d.txt", {"prefill": 2, "decode": 3}),
    ],
)
def test_dry_run_is_word_for_word(name: str, wishes: dict[str, Any]) -> None:
    """Rewrite a golden file by running this test with KVDUPLEX_GOLDEN=write."""
    shown = dryrun.as_shell(units(planned(**wishes))) + "\n"
    if os.environ.get("KVDUPLEX_GOLDEN") == "write":
        (GOLDEN / name).write_text(shown)
    assert shown == (GOLDEN / name).read_text()


def test_a_shell_reads_a_dry_run_as_it_was_planned() -> None:
    odd = {
        Role.DECODE: {
            "environment": {"ODD": "a b'c\"d $e"},
            "extra_argv": ("--override-generation-config", '{"a": "b c"}'),
        }
    }
    cluster = planned(settings=odd)
    stubs = 'mkdir() { :; }; env() { printf "%s\\0" "$@"; }; function /venv/bin/python { env "$FUNCNAME" "$@"; }\n'
    paragraphs = dryrun.as_shell(units(cluster)).split("\n\n")
    for paragraph, unit in zip(paragraphs, units(cluster), strict=True):
        told = subprocess.run(["bash", "-c", stubs + paragraph], capture_output=True, text=True, check=True, timeout=10)
        environment = [f"{key}={value}" for key, value in sorted(unit.environment.items())]
        assert told.stdout.split("\0") == [*environment, *unit.argv, ""]


def test_dry_run_as_json_holds_the_same() -> None:
    cluster = planned()
    plan = json.loads(dryrun.as_json(units(cluster)))
    assert [unit["argv"] for unit in plan["units"]] == [list(unit.argv) for unit in units(cluster)]


def test_prefix_caching_of_the_prefill_engine_can_be_switched_off() -> None:
    prefill, decode, _ = units(planned(prefill_prefix_cache=False))
    assert "--no-enable-prefix-caching" in prefill.argv
    assert "--enable-prefix-caching" in decode.argv


def test_engines_get_different_cores_and_ports() -> None:
    cluster = planned(prefill=2, decode=2)
    ports = [port for unit in units(cluster) for port in unit.ports.values()]
    assert len(ports) == len(set(ports))
    assert [unit.cores for unit in cluster.engines] == [{0}, {1}, {0}, {1}]
    assert [unit.environment["GOMP_CPU_AFFINITY"] for unit in cluster.engines] == ["0", "1", "0", "1"]


def test_an_offset_moves_every_engine_port() -> None:
    plain, moved = planned(), planned(port_offset=1000)
    for before, after in zip(plain.engines, moved.engines, strict=True):
        assert {purpose: port + 1000 for purpose, port in before.ports.items()} == dict(after.ports)


def test_only_stock_decode_engines_put_parameters_into_streams() -> None:
    assert ["--middleware" in unit.argv for unit in planned().engines] == [False, False]
    assert ["--middleware" in unit.argv for unit in planned(connector=ConnectorKind.STOCK).engines] == [False, True]


def test_the_router_learns_lease_endpoints_only_of_leased_engines() -> None:
    assert "#lease=" not in flag(units(planned(connector=ConnectorKind.STOCK))[-1], "--decode")
    leased = units(planned())[-1]
    assert flag(leased, "--decode") == "http://127.0.0.1:8200#lease=127.0.0.1:5900"


def test_a_router_for_all_addresses_is_reached_at_loopback() -> None:
    where = Where(host="0.0.0.0", port=9, logs=WHERE.logs, scratch=WHERE.scratch, cache=WHERE.cache)
    router = units(planned(where))[-1]
    assert (router.url, flag(router, "--listen")) == ("http://127.0.0.1:9", "0.0.0.0:9")


def test_a_folder_lends_its_name_and_its_limit(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 2048}')
    cluster = planned(model=str(folder))
    assert cluster.model == "my-model"
    assert flag(cluster.engines[0], "--max-model-len") == "2048"
    assert flag(cluster.engines[0], "--kv-cache-memory-bytes") == str(1 << 30)


def test_a_hub_id_is_passed_on() -> None:
    cluster = planned(model="Qwen/Qwen3-0.6B")
    assert cluster.model == flag(cluster.engines[0], "--model") == "Qwen/Qwen3-0.6B"
    assert "HF_HUB_OFFLINE" not in cluster.engines[0].environment


def test_settings_go_to_the_roles_they_name() -> None:
    settings = parse_settings(["seed=7", "decode.decoder_kv_blocks_ttl=5", "prefill.extra_argv=[--x, y]"])
    assert settings[Role.PREFILL] == {"seed": 7, "extra_argv": ["--x", "y"]}
    assert settings[Role.DECODE] == {"seed": 7, "decoder_kv_blocks_ttl": 5}


@pytest.mark.parametrize("text", ["", "seed", "=1", "router.seed=1", "decode.=1", "seed={"])
def test_a_setting_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        parse_settings([text])


def test_an_unknown_setting_is_refused_with_its_place() -> None:
    with pytest.raises(UsageError, match="serve cpu, decode: sed: unknown key, did you mean seed"):
        planned(settings=parse_settings(["decode.sed=1"]))


def test_examples_can_be_run(tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text(curl_example("http://127.0.0.1:8000", "a model"))
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    compile(openai_example("http://127.0.0.1:8000", "a model"), "example", "exec")


def test_the_text_names_every_address_and_the_way_to_stop() -> None:
    text = ready_text(planned(), seconds=41.7)
    for expected in ("Ready after 42 s", "http://127.0.0.1:8000", ":8100", ":8200", "/logs", "Ctrl-C"):
        assert expected in text


class TestLaunch:
    """A whole launch in a process of its own, over programs that stand for engines and router."""

    SCRIPT = """
import json, os, sys
from pathlib import Path
from kvduplex.announce import Cluster
from kvduplex.launch import Output, launch
from kvduplex.supervise import Unit, UnitKind
given = json.loads(sys.argv[1])
def unit(name, kind, port):
    argv = (sys.executable, "-I", "-S", "-c", given["script"], str(port))
    folder = Path(given["folder"])
    return Unit(name=name, kind=kind, argv=argv, url=f"http://127.0.0.1:{port}", ports={"http": port},
                log=folder / "logs" / f"{name}.log", scratch=folder / "run" / "8000" / name)
launch(
    Cluster(engines=[unit("decode-0", UnitKind.ENGINE, given["ports"][0])], roles={"decode-0": "decode"},
            router=unit("router", UnitKind.ROUTER, given["ports"][1]), model="tiny", logs=Path(given["folder"])),
    findings=list, port_options={UnitKind.ENGINE: "--port-offset", UnitKind.ROUTER: "--port"},
    runtime=Path(given["folder"]) / "run", environment=os.environ, timeout_s=30, output=Output(json=True))
"""

    @pytest.fixture
    def start(self, short_folder: Path, free_port: Callable[[], int], marked: Marked) -> Start:
        ports = [free_port(), free_port()]

        def run(script: str = SERVE) -> subprocess.Popen[str]:
            given = {"script": script, "folder": str(short_folder), "ports": ports}
            return subprocess.Popen(
                [sys.executable, "-c", self.SCRIPT, json.dumps(given)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "KVDUPLEX_TEST": marked.mark},
            )

        return run

    def test_ready_line_then_an_orderly_end_that_leaves_nothing(
        self, start: Start, short_folder: Path, marked: Marked
    ) -> None:
        with start() as process:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert (ready["event"], ready["model"], ready["pid"]) == ("ready", "tiny", process.pid)
            (engine,) = ready["engines"]
            assert engine["role"] == "decode"
            assert psutil.Process(engine["pid"]).cmdline()[-1] == str(engine["ports"]["http"])
            assert sorted(path.name for path in (short_folder / "run").rglob("*")) == [
                "8000", "decode-0", "router",
                *sorted(f"serve-{unit['ports']['http']}.lock" for unit in (engine, ready["router"])),
            ]  # fmt: skip
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 0
        assert marked() == []
        assert list((short_folder / "run").iterdir()) == []

    def test_a_supervisor_that_is_killed_leaves_nothing(
        self,
        start: Start,
        short_folder: Path,
        marked: Marked,
        eventually: Callable[..., None],
    ) -> None:
        with start() as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.kill()
            process.wait(timeout=10)
            eventually(lambda: not marked(), "the end of everything")
            assert not (short_folder / "run" / "8000").exists()
        # The lock files stay, but the kernel released them: the next start takes them.
        locks = list((short_folder / "run").glob("serve-*.lock"))
        assert len(locks) == 2
        for lock in locks:
            with file_lock(lock):
                pass

    def test_a_second_start_names_the_first(self, start: Start) -> None:
        with start() as first:
            assert first.stdout is not None
            first.stdout.readline()
            with start() as second:
                _, complaint = second.communicate(timeout=20)
            assert second.returncode == 1  # an uncaught PreflightError here; the command line makes it 2
            assert f"belongs to another `kvduplex serve`: process {first.pid} (" in complaint
            first.terminate()
            assert first.wait(timeout=10) == 0

    def test_a_start_after_an_end_succeeds_at_the_same_ports(self, start: Start) -> None:
        for _ in range(2):
            with start() as process:
                assert process.stdout is not None
                assert json.loads(process.stdout.readline())["event"] == "ready"
                process.terminate()
                assert process.wait(timeout=10) == 0


def launched(cluster: Cluster, tmp_path: Path, **other: Any) -> None:
    values: dict[str, Any] = {
        "findings": list,
        "port_options": OPTIONS,
        "runtime": tmp_path / "run",
        "environment": os.environ,
        "timeout_s": 20,
        "output": Output(json=True),
        **other,
    }
    launch(cluster, **values)


def test_a_failed_finding_stops_before_anything_is_prepared(tmp_path: Path, make_unit: Callable[..., Unit]) -> None:
    cluster = Cluster(engines=[make_unit(SERVE)], roles={"decode-0": "decode"}, router=None, model="m", logs=tmp_path)
    missing = Finding("host.compiler", Severity.FAIL, "no gcc", "gcc", "why", "apt-get install gcc")
    with pytest.raises(PreflightError, match="no gcc"):
        launched(cluster, tmp_path, findings=lambda: [missing], prepare=lambda: pytest.fail("prepared"))
    assert list((tmp_path / "run").iterdir()) == []


def test_an_engine_that_dies_while_loading_is_the_launch_s_error(
    tmp_path: Path, make_unit: Callable[..., Unit], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(
        engines=[make_unit("raise SystemExit(3)")], roles={"decode-0": "decode"}, router=None, model="m", logs=tmp_path
    )
    with pytest.raises(EngineFailedError, match="decode-0 ended with exit code 3 while starting"):
        launched(cluster, tmp_path)
    assert capsys.readouterr().out == ""


def test_warnings_are_shown_and_do_not_stop(
    tmp_path: Path, make_unit: Callable[..., Unit], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(engines=[make_unit("")], roles={"decode-0": "decode"}, router=None, model="m", logs=tmp_path)
    warning = Finding("host.cores", Severity.WARN, "1", "2 or more", "they share a core", "allow more")
    with pytest.raises(EngineFailedError):  # it was started, although its program does nothing
        launched(cluster, tmp_path, findings=lambda: [warning])
    assert "note: host.cores: 1; expected: 2 or more; they share a core" in capsys.readouterr().err


def test_a_log_folder_that_cannot_be_made_is_refused(tmp_path: Path, make_unit: Callable[..., Unit]) -> None:
    (tmp_path / "file").touch()
    logs = tmp_path / "file" / "logs"
    cluster = Cluster(engines=[make_unit(SERVE)], roles={"decode-0": "decode"}, router=None, model="m", logs=logs)
    with pytest.raises(PreflightError, match=r"cannot create the log folder .*Choose another with --logs"):
        launched(cluster, tmp_path)


def test_a_scratch_path_too_long_for_sockets_is_refused(tmp_path: Path, make_unit: Callable[..., Unit]) -> None:
    deep = tmp_path / ("x" * 80)
    cluster = Cluster(
        engines=[make_unit(SERVE, scratch=deep)], roles={"decode-0": "decode"}, router=None, model="m", logs=tmp_path
    )
    with pytest.raises(PreflightError, match="XDG_RUNTIME_DIR to a shorter path"):
        launched(cluster, tmp_path)
