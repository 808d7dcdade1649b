"""SRV records, asked of a real name server on loopback, by UDP and, for answers that do not fit, by TCP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from kvduplex_router.config import DnsSource, build_config
from kvduplex_router.errors import ConfigError
from kvduplex_router.fleet.discovery.source import DiscoveryError
from kvduplex_router.fleet.discovery.srv import SrvNames, ask_srv
from kvduplex_router.fleet.discovery.watch import Discovery
from kvduplex_router.fleet.members import Members

NAME = "_http._tcp.decode.internal"


class NameServer(asyncio.DatagramProtocol):
    """Answers every question for SRV records with `records`, as ``PRIORITY WEIGHT PORT TARGET``."""

    def __init__(self) -> None:
        self.records: list[str] = []
        self.code = dns.rcode.NOERROR
        self.silent = False
        self.udp_records = 100
        self.asked: list[str] = []
        self.by_tcp = 0
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        if not self.silent:
            self._transport.sendto(self._answer(data, fits=self.udp_records >= len(self.records)), addr)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.by_tcp += 1
        size = int.from_bytes(await reader.readexactly(2), "big")
        answer = self._answer(await reader.readexactly(size), fits=True)
        writer.write(len(answer).to_bytes(2, "big") + answer)
        await writer.drain()
        writer.close()

    def _answer(self, data: bytes, *, fits: bool) -> bytes:
        query = dns.message.from_wire(data)
        (question,) = query.question
        self.asked.append(question.name.to_text(omit_final_dot=True))
        answer = dns.message.make_response(query)
        answer.set_rcode(self.code)
        if not fits:
            answer.flags |= dns.flags.TC
        elif self.records and question.rdtype == dns.rdatatype.SRV:
            answer.answer.append(dns.rrset.from_text(question.name, 5, "IN", "SRV", *self.records))
        return answer.to_wire()


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(50):
            transport, made = await asyncio.get_running_loop().create_datagram_endpoint(
                NameServer, local_addr=("127.0.0.1", 0)
            )
            stack.callback(transport.close)
            with contextlib.suppress(OSError):  # the port of the same number may be somebody's
                tcp = await asyncio.start_server(made.stream, "127.0.0.1", made.port)
                await stack.enter_async_context(tcp)
                break
        else:
            raise AssertionError("no port is free for UDP and TCP")
        yield made


ZONE = {"a.internal": ["fd00::1", "10.0.0.9", "10.0.0.1"], "b.internal": ["10.0.0.2"], "c.internal": ["::1"]}


async def resolve(name: str) -> Sequence[str]:
    await asyncio.sleep(0)
    if name not in ZONE:
        raise OSError(-2, "Name or service not known")
    return ZONE[name]


def source_of(server: NameServer, **more: Any) -> SrvNames:
    def resolver() -> dns.asyncresolver.Resolver:
        made = dns.asyncresolver.Resolver(configure=False)
        made.nameservers, made.port = ["127.0.0.1"], server.port
        return made

    config = DnsSource.model_validate({"name": NAME, "srv": True, "role": "decode", **more})
    ask = functools.partial(ask_srv, resolver=resolver, lifetime_s=0.5)
    return SrvNames(config, interval_s=1, missing_after=2, ask=ask, resolve=resolve)


async def test_host_and_port_are_the_records(server: NameServer) -> None:
    """Priorities and weights are ignored, and a host with several addresses is one engine."""
    server.records = ["0 5 8201 b.internal.", "9 0 8200 a.internal.", "0 5 8202 b.internal.", "0 0 8200 c.internal."]
    listed = await source_of(server, lease_port=5900, scheme="https").look()
    assert [(each.role.value, each.config.url, each.config.lease) for each in listed] == [
        ("decode", "https://10.0.0.1:8200", "10.0.0.1:5900"),
        ("decode", "https://10.0.0.2:8201", "10.0.0.2:5900"),
        ("decode", "https://10.0.0.2:8202", "10.0.0.2:5900"),
        ("decode", "https://[::1]:8200", "[::1]:5900"),
    ]
    assert server.asked == [NAME]
    assert server.by_tcp == 0


async def test_every_record_may_have_ranks(server: NameServer) -> None:
    server.records = ["0 0 8200 b.internal."]
    listed = await source_of(server, dp_size=2, kv_events_port=5557).look()
    assert [(each.config.name, each.config.kv_events) for each in listed] == [
        ("10.0.0.2:8200@0", "10.0.0.2:5557"), ("10.0.0.2:8200@1", "10.0.0.2:5558"),
    ]  # fmt: skip


async def test_an_answer_that_does_not_fit_is_asked_for_by_tcp(server: NameServer) -> None:
    server.records = [f"0 0 {port} b.internal." for port in range(8000, 8150)]
    listed = await source_of(server).look()
    assert len({each.config.url for each in listed}) == 150
    assert server.by_tcp == 1


async def test_a_host_that_does_not_resolve_is_left_out_and_the_name_fails_when_none_does(server: NameServer) -> None:
    server.records = ["0 0 8200 b.internal.", "0 0 8200 gone.internal."]
    source = source_of(server)
    assert [each.config.url for each in await source.look()] == ["http://10.0.0.2:8200"]
    server.records = ["0 0 8200 gone.internal."]
    with pytest.raises(DiscoveryError, match=r"none of the hosts that _http\._tcp\..* resolves, e.g. gone.internal"):
        await source.look()


async def test_a_record_that_says_there_is_no_such_service_lists_nothing(server: NameServer) -> None:
    server.records = ["0 0 0 ."]
    assert list(await source_of(server).look()) == []


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (dns.rcode.NXDOMAIN, f"{NAME} has no SRV records to be had: The DNS query name does not exist"),
        (dns.rcode.NOERROR, f"{NAME} has no SRV records to be had: The DNS response does not contain an answer"),
        (dns.rcode.SERVFAIL, f"{NAME} has no SRV records to be had: .*SERVFAIL"),
    ],
)
async def test_what_goes_wrong_is_said(server: NameServer, code: dns.rcode.Rcode, told: str) -> None:
    server.code = code
    with pytest.raises(DiscoveryError, match=told):
        await source_of(server).look()


async def test_engines_stay_while_the_name_server_is_away(server: NameServer, present: Any) -> None:
    members = Members(present, check=lambda _member: None)
    source = source_of(server)
    discovery = Discovery([source], members, timeout_s=1)
    server.records = ["0 0 1 a.internal.", "0 0 2 b.internal."]
    await discovery.look(source)
    assert present.names == {"10.0.0.1:1", "10.0.0.2:2"}
    server.silent = True
    await Discovery([source], members, timeout_s=0.05).look(source)
    assert members.errors == {f"dns:{NAME}:srv": "no answer within 0.05 s"}
    server.silent, server.code = False, dns.rcode.SERVFAIL
    await discovery.look(source)
    assert present.names == {"10.0.0.1:1", "10.0.0.2:2"}
    server.code, server.records = dns.rcode.NOERROR, ["0 0 2 b.internal."]
    await discovery.look(source)
    assert present.names == {"10.0.0.1:1", "10.0.0.2:2"}, "let go after two looks, as `missing_after` says"
    await discovery.look(source)
    assert present.names == {"10.0.0.2:2"}
    assert members.errors == {}


def test_srv_records_are_asked_for_by_name(tmp_path: Path) -> None:
    short = build_config(None, engines_dns=(f"{NAME}:srv=replica",)).discovery.dns[0]
    assert (short.name, short.srv, short.port) == (NAME, True, None)
    file = tmp_path / "router.yaml"
    for given, told in (
        ({"port": 1, "srv": True}, "discovery.dns.0: port 1 and srv are both given; give port, or srv: true for"),
        ({}, "discovery.dns.0: neither port nor srv is given; give port, or srv: true"),
    ):
        file.write_text(json.dumps({"discovery": {"dns": [{"name": NAME, "role": "replica", **given}]}}))
        with pytest.raises(ConfigError, match=told):
            build_config(file)
