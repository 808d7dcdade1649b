"""The command refuses what cannot be started, with a way out, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvduplex.errors import KvduplexError
from kvduplex.sim_command import app
from kvduplex_bench.sim.errors import SimError
from kvduplex_bench.sim.fleet import addresses
from kvduplex_bench.sim.http.tokens import Tokens
from kvduplex_bench.sim.settings import EngineSettings, Role


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--replicas N"),
        (["--prefill", "2"], "--prefill N and --decode M"),
        (["--replicas", "200", "--prefill", "40", "--decode", "40"], "256 engines at most"),
        (["--replicas", "1", "--model-timing", "nothing"], "cpu-tiny, glm-5-fp8-p5en"),
    ],
)
def test_what_cannot_be_started_is_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, KvduplexError)
    assert said in str(done.exception)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(SimError, match=str(tmp_path)):
        Tokens(tmp_path)


def test_ports_of_engines_do_not_overlap() -> None:
    found = addresses(3, host="127.0.0.1", port=9000)
    ports = [port for each in found for port in (each.port, each.events, each.replay, each.lease)]
    assert sorted(ports) == list(range(9000, 9012))


def test_a_router_is_told_what_a_role_has(make_settings: Callable[..., EngineSettings]) -> None:
    address = make_settings().address
    assert f"lease=127.0.0.1:{address.lease}" in address.entry(Role.DECODE)
    assert "lease" not in address.entry(Role.PREFILL)
    assert f"kv_replay=127.0.0.1:{address.replay}" in address.entry(Role.REPLICA)
