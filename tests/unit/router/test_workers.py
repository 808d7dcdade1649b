"""What workers and hub say to each other, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.api.view import Topic
from kvduplex_router.compose import compose_ledger, compose_members
from kvduplex_router.config import RouterConfig
from kvduplex_router.conversations.endpoints import LedgerTarget
from kvduplex_router.conversations.ledger import Fate, Taken
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.workers.channel import Channel
from kvduplex_router.workers.hub import Hub
from kvduplex_router.workers.link import HubLink
from kvduplex_router.workers.messages import Release, decode_from_worker, encode


def channel(heard: list[bytes]) -> Channel:
    return Channel(on_made=lambda _: None, on_body=lambda _, body: heard.append(body), on_lost=lambda _: None)


@given(st.lists(st.text(max_size=20), max_size=6), st.data())
def test_messages_are_whole_however_their_bytes_come(leases: list[str], data: st.DataObject) -> None:
    sent = [Release("d:1", lease) for lease in leases]
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    heard: list[bytes] = []
    end = channel(heard)
    for begin, until in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        end.data_received(stream[begin:until])
    assert [decode_from_worker(body) for body in heard] == sent


async def test_a_peer_that_does_not_read_is_not_listened_to() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    heard: list[bytes] = []
    _, end = await loop.create_connection(lambda: channel(heard), sock=ours)
    try:
        for _ in range(40):
            end.send(Release("d:1", "x" * 50_000))
        await loop.sock_sendall(theirs, encode(Release("d:1", "unheard")))
        await asyncio.sleep(0.1)
        assert heard == []
        while not heard:
            async with asyncio.timeout(10):
                await loop.sock_recv(theirs, 1 << 20)
        assert decode_from_worker(heard[0]) == Release("d:1", "unheard")
    finally:
        end.close()
        theirs.close()


async def test_a_hub_that_goes_away_answers_those_who_wait(tmp_path: Path) -> None:
    served: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_unix_server(lambda _reader, writer: served.put_nowait(writer), tmp_path / "hub")
    link, connected = HubLink(), asyncio.Event()
    running = asyncio.create_task(link.run(tmp_path / "hub", connected))
    try:
        async with asyncio.timeout(10):
            hub = await served.get()
            asking = asyncio.create_task(link.take([b"k"]))
            await asyncio.sleep(0)
            hub.close()
            assert await asking is None
            await running
        assert await link.take([b"k"]) is None
    finally:
        running.cancel()
        server.close()


async def test_all_workers_are_asked_and_one_that_does_not_answer_costs_its_part_alone(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(number: int, most: int) -> bytes:
        return b"%d of %d" % (most, number)

    monkeypatch.setattr("kvduplex_router.workers.hub._SCRAPE_S", 0.2)
    config = RouterConfig.model_validate({"engines": ["http://127.0.0.1:9"]})
    ledger = compose_ledger(config).ledger
    members, _ = compose_members(config, LedgerTarget(config, ledger))
    hub = Hub(ledger, members)
    await hub.start(tmp_path / "hub")
    links = [HubLink() for _ in range(3)]
    for number, link in enumerate(links[:2]):
        link.tellers = {Topic.RECEIPTS: partial(told, number)}
    running = [asyncio.create_task(link.run(tmp_path / "hub", asyncio.Event())) for link in links]
    try:
        await tools.eventually(lambda: hub.workers == 3, "all are connected")
        async with asyncio.timeout(10):
            assert sorted(await links[0].told(Topic.RECEIPTS, most=5)) == [b"5 of 0", b"5 of 1"]
            await hub.close()
            await asyncio.gather(*running)
            assert await links[0].told(Topic.RECEIPTS, most=5) == [b"5 of 0"]
    finally:
        for task in running:
            task.cancel()


async def test_what_a_worker_puts_back_another_may_take(tools: Any, tmp_path: Path) -> None:
    config = RouterConfig.model_validate({"engines": ["http://127.0.0.1:9"]})
    ledger = compose_ledger(config).ledger
    members, _ = compose_members(config, LedgerTarget(config, ledger))
    hub = Hub(ledger, members)
    await hub.start(tmp_path / "hub")
    first, second = links = [HubLink(), HubLink()]
    running = [asyncio.create_task(link.run(tmp_path / "hub", asyncio.Event())) for link in links]
    old, new = (Reference("d:1", time.monotonic(), params=params) for params in (b"{}", b'{"new":1}'))

    async def taken() -> Taken | None:
        return await second.take([b"other", b"k"])

    try:
        await tools.eventually(lambda: hub.workers == 2, "both are connected")
        async with asyncio.timeout(10):
            first.put(b"k", old, 0.0)
            assert await first.take([b"k"]) == Taken(old, Fate.HELD, b"k")
            first.put_back(b"k", old, 0.0)
            assert await first.take([]) is None, "what was sent before has been heard"
            assert await taken() == Taken(old, Fate.HELD, b"k")
            first.put(b"k", new, 0.0)
            first.put_back(b"k", old, 0.0)
            assert await first.take([]) is None
            assert await taken() == Taken(new, Fate.HELD, b"k")
            assert await taken() is None
    finally:
        await hub.close()
        await asyncio.gather(*running)


async def test_sending_needs_no_hub() -> None:
    link = HubLink()
    link.release("d:1", "lease")
    link.put_back(b"k", Reference("d:1", 0.0), 0.0)
    assert await link.take([b"k"]) is None
