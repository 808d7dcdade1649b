"""Sources of engines put together: precedence, clashes, operators' word."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvduplex_router.config import DiscoveryConfig, DnsSource, EngineConfig, build_config
from kvduplex_router.errors import ConfigError
from kvduplex_router.fleet.discovery.dns import DnsNames, resolve
from kvduplex_router.fleet.discovery.file import FileSource
from kvduplex_router.fleet.discovery.source import DiscoveryError
from kvduplex_router.fleet.discovery.watch import Discovery
from kvduplex_router.fleet.engine import EngineRole
from kvduplex_router.fleet.members import Member, Members


class Target:
    """What members are carried out on."""

    def __init__(self) -> None:
        self.present: dict[str, str] = {}
        self.leaving: set[str] = set()
        self.left: list[str] = []

    def join(self, source: str, member: Member) -> None:
        assert member.config.name not in self.present
        self.present[member.config.name] = source

    def leave(self, name: str) -> None:
        self.left.append(name)
        del self.present[name]
        self.leaving.discard(name)

    def mark(self, name: str, *, leaving: bool) -> None:
        assert name in self.present
        (self.leaving.add if leaving else self.leaving.discard)(name)


def member(name: str, role: EngineRole = EngineRole.REPLICA, *, leaving: bool = False, **more: Any) -> Member:
    entry = EngineConfig(url=more.pop("url", f"http://{name}:1"), name=name, **more)
    return Member.of(role, entry, leaving=leaving)


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def members(target: Target) -> Members:
    return Members(target, check=lambda member: "no" if member.config.name == "bad" else None)


def test_engines_come_change_and_go_with_their_source(members: Members, target: Target) -> None:
    members.update("file", [member("a"), member("b")])
    members.update("dns", [member("b"), member("c", leaving=True)])
    assert target.present == {"a": "file", "b": "file", "c": "dns"}
    assert target.leaving == {"c"}
    members.update("file", [member("a", leaving=True)])
    assert target.present == {"a": "file", "b": "file", "c": "dns"}, "still listed by another source"
    assert target.leaving == {"a", "c"}
    members.update("file", [member("a")])
    members.update("dns", [])
    assert target.present == {"a": "file"}
    assert target.leaving == set()


def test_a_changed_entry_is_another_engine(members: Members, target: Target) -> None:
    members.update("file", [member("a")])
    members.update("file", [member("a", max_in_flight=4)])
    assert target.left == ["a"]
    assert target.present == {"a": "file"}


def test_clashes_are_refused_and_named(members: Members, target: Target) -> None:
    members.update("config", [member("p", EngineRole.PREFILL)])
    members.update("file", [member("p", EngineRole.PREFILL, url="http://other:1"), member("r"), member("bad")])
    assert target.present == {"p": "config"}
    assert [refused.reason for refused in members.refused] == [
        "another engine is named 'p'; names are unique in a fleet",
        "a replica engine does not fit a fleet that has prefill engines",
        "no",
    ]


def test_an_operator_has_the_last_word(members: Members, target: Target) -> None:
    members.update("file", [member("a"), member("b")])
    assert members.dismiss("a")
    assert not members.dismiss("nobody")
    members.update("file", [member("a"), member("b"), member("c")])
    assert set(target.present) == {"b", "c"}
    assert members.admit(member("a")) is None
    assert target.present["a"] == "admin"
    assert members.admit(member("bad")) == "no"
    assert "does not fit" in str(members.admit(member("p", EngineRole.PREFILL)))
    assert members.admit(member("b", max_in_flight=3)) is None
    assert target.present == {"a": "admin", "b": "admin", "c": "file"}
    assert members.dismiss("a")
    assert set(target.present) == {"b", "c"}


def test_a_roster_makes_another_process_agree(members: Members, target: Target) -> None:
    members.update("file", [member("a"), member("b")])
    members.note("dns", "it is gone")
    members.dismiss("a")
    other_target = Target()
    other = Members(other_target, check=lambda _member: None)
    other.update("config", [member("z")])
    other.replace(members.roster)
    assert other_target.present == target.present == {"b": "file"}
    assert other.roster == members.roster


# -- files -------------------------------------------------------------------------------------------------------


async def names_of(source: Any) -> list[tuple[str, str]]:
    return [(each.role.value, each.config.name) for each in await source.look()]


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    source = FileSource(path, interval_s=1)
    with pytest.raises(DiscoveryError, match=r"engines.yaml: No such file"):
        await source.look()
    path.write_text("prefill: [http://p:1]\ndecode: ['http://d:1#lease=d:2']\n")
    assert await names_of(source) == [("prefill", "p:1"), ("decode", "d:1")]
    path.with_suffix(".new").write_text(json.dumps({"engines": [{"url": "http://r:1", "name": "r"}]}))
    path.with_suffix(".new").rename(path)
    assert await names_of(source) == [("replica", "r")]
    path.write_text("engines: []")
    assert await names_of(source) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it is empty"),
        ("engines: [http://]", "engines.0.url: 'http://' is not a URL"),
        ("engine: [http://a:1]", "engine: Extra inputs are not permitted; write prefill:, decode: or engines:"),
        ("{", "not valid YAML"),
        ("[1]", "write prefill:, decode: or engines:"),
    ],
)
async def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(text)
    with pytest.raises(DiscoveryError) as caught:
        await FileSource(path, interval_s=1).look()
    assert told in str(caught.value)


# -- names -------------------------------------------------------------------------------------------------------


async def test_a_name_is_resolved_by_the_system() -> None:
    assert "127.0.0.1" in await resolve("localhost")
    with pytest.raises(OSError, match=r"."):
        await resolve("no-such-host.invalid")


class Zone:
    """Answers that change."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] | None = ["10.0.0.1", "10.0.0.2"]

    async def resolve(self, _name: str) -> Sequence[str]:
        if self.addresses is None:
            raise OSError(-2, "Name or service not known")
        return self.addresses


async def test_a_name_loses_an_engine_only_after_several_answers(members: Members, target: Target) -> None:
    zone = Zone()
    config = DnsSource(name="d.internal", port=8200, role="decode", lease_port=5900)  # type: ignore[arg-type]
    source = DnsNames(config, interval_s=1, missing_after=2, resolve=zone.resolve)
    discovery = Discovery([source], members, timeout_s=1)
    await discovery.look(source)
    assert set(target.present) == {"10.0.0.1:8200", "10.0.0.2:8200"}
    zone.addresses = ["10.0.0.1", "::1"]
    await discovery.look(source)
    assert set(target.present) == {"10.0.0.1:8200", "10.0.0.2:8200", "[::1]:8200"}
    zone.addresses = None
    await discovery.look(source)
    assert members.errors == {"dns:d.internal:8200": "d.internal does not resolve: Name or service not known"}
    assert len(target.present) == 3
    zone.addresses = ["10.0.0.1", "::1"]
    await discovery.look(source)
    assert set(target.present) == {"10.0.0.1:8200", "[::1]:8200"}
    assert members.errors == {}


async def test_a_silent_source_is_given_up_after_its_deadline(members: Members) -> None:
    async def never(_name: str) -> Sequence[str]:
        await asyncio.get_running_loop().create_future()
        return []

    config = DnsSource(name="d", port=1, role="replica")  # type: ignore[arg-type]
    source = DnsNames(config, interval_s=1, missing_after=1, resolve=never)
    await Discovery([source], members, timeout_s=0.01).look(source)
    assert members.errors == {"dns:d:1": "no answer within 0.01 s"}


# -- configuration -----------------------------------------------------------------------------------------------


def test_short_forms_of_sources() -> None:
    config = build_config(
        None, engines_dns=("d.internal:8200=decode",), engines_ec2=("tag:kvduplex:role=decode,asg:g,lease_port=0",)
    )
    assert config.discovery.dns[0].model_dump(include={"name", "port", "role"}) == {
        "name": "d.internal", "port": 8200, "role": "decode",
    }  # fmt: skip
    ec2 = config.discovery.ec2[0]
    assert (ec2.tags, ec2.group, ec2.lease_port) == ({"kvduplex:role": "decode"}, "g", 0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"engines_dns": ("d=decode",)}, "'d=decode' is not NAME:PORT=ROLE, e.g."),
        ({"engines_dns": ("d:1=cook",)}, "Input should be 'prefill', 'decode' or 'replica', got 'cook'"),
        ({"engines_ec2": ("role=decode",)}, "give tags or group"),
        ({"engines_ec2": ("name=x",)}, "'name=x' is not tag:KEY=VALUE, asg:NAME or one of role, region"),
        ({"discovery": {"files": "x"}}, "unknown key; allowed here: dns, dns_interval_s, ec2"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(None, **given)
    assert told in str(caught.value)


def test_without_engines_and_sources_there_is_nothing_to_start() -> None:
    assert not DiscoveryConfig().enabled
    with pytest.raises(ConfigError, match="--engines-file FILE"):
        build_config(None)
