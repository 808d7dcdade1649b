"""A decode engine that stands still for a while, as when its machine is paused, and goes on."""

from __future__ import annotations

import asyncio
from typing import Any

from kvduplex_router.fleet.engine import EngineHealth


async def test_a_request_that_it_never_read_may_be_sent_again(make_cluster: Any, tools: Any) -> None:
    """A connection kept from before may be closed as idle too long, unread, and probes have found the engine silent.

    Then no engine is left to try at once, and nothing of the turn was consumed: the client is told to come again.
    """
    cluster = await make_cluster()
    await cluster.client.chat()
    (engine,) = [each for each in cluster.router.fleet.engines if each.role.value == "decode"]
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def stand_still(request: Any) -> None:
        reached.set()
        await go_on.wait()
        request.writer.close()

    cluster.d.handler = stand_still
    cluster.d.hang_health = True
    waiting = asyncio.create_task(cluster.client.chat())
    await reached.wait()
    engine.health = EngineHealth.DOWN  # what probes conclude
    go_on.set()
    answer = await waiting
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json["error"]["type"] == "service_unavailable_error"
