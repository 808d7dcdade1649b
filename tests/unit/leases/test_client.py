"""The router's client over real loopback sockets."""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import Callable, Sequence

import pytest

from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.client import AsyncLeaseClient
from kvduplex_transfer.leases.errors import InvalidLeaseError, LeaseUnreachableError
from kvduplex_transfer.leases.server import LeaseServer
from kvduplex_transfer.leases.table import LeaseTable

Chains = Callable[[Sequence[object]], HashChain]


async def test_hello_tells_who_answers(server: LeaseServer) -> None:
    async with AsyncLeaseClient(server.endpoint, timeout_s=5) as client:
        identity = await client.hello()
    assert (identity.engine_id, identity.block_size, identity.max_ttl_s) == ("engine-1", 32, 480.0)


async def test_renewals_and_releases_say_what_is_alive(
    server: LeaseServer, table: LeaseTable, make_chain: Chains
) -> None:
    table.hold("a", make_chain("A"), [1])
    table.hold("b", make_chain("B"), [2])
    async with AsyncLeaseClient(server.endpoint, timeout_s=5) as client:
        assert await client.renew(["a", "gone"], 60) == {"a"}
        assert await client.renew(["a", "b"]) == {"a", "b"}
        assert await client.release(["b", "gone"]) == {"b"}
        assert await client.renew(["a", "b"]) == {"a"}
        assert await client.renew([]) == frozenset()


async def test_thousands_of_leases_go_in_bounded_messages(
    server: LeaseServer, table: LeaseTable, make_chain: Chains
) -> None:
    chain = make_chain("A")
    ids = [f"lease-{number}" for number in range(3000)]
    for lease in ids:
        table.hold(lease, chain, [1])
    async with AsyncLeaseClient(server.endpoint, timeout_s=10) as client:
        assert await client.renew(ids) == set(ids)


async def test_calls_of_many_tasks_do_not_mix(server: LeaseServer, table: LeaseTable, make_chain: Chains) -> None:
    for number in range(50):
        table.hold(f"l{number}", make_chain([number]), [number])
    async with AsyncLeaseClient(server.endpoint, timeout_s=10) as client:
        replies = await asyncio.gather(*(client.renew([f"l{number}"]) for number in range(100)))
    assert [len(reply) for reply in replies] == [1] * 50 + [0] * 50


async def test_a_dead_endpoint_is_unreachable_by_the_deadline() -> None:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        async with AsyncLeaseClient(f"tcp://127.0.0.1:{port}", timeout_s=0.05) as client:
            with pytest.raises(LeaseUnreachableError, match=rf"{port}: no answer within 0.05 s"):
                await client.hello()
            assert not client._waiting


async def test_closing_ends_waiting_calls() -> None:
    client = AsyncLeaseClient("tcp://127.0.0.1:9", timeout_s=60)
    call = asyncio.create_task(client.renew(["a"]))
    await asyncio.sleep(0)  # lets the call begin; nothing is awaited from outside
    assert client._waiting
    await client.close()
    with pytest.raises(LeaseUnreachableError, match="closed"):
        await call
    await client.close()


async def test_bad_arguments_never_leave(server: LeaseServer) -> None:
    async with AsyncLeaseClient(server.endpoint) as client:
        for bad in (["x" * 10_000], ["a b"]):
            with pytest.raises(InvalidLeaseError):
                await client.renew(bad)
        with pytest.raises(InvalidLeaseError):
            await client.renew(["a"], -1)
    with pytest.raises(InvalidLeaseError):
        AsyncLeaseClient("http://127.0.0.1:1")
