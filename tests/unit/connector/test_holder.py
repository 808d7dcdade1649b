"""The decode engine's side against a pool that counts references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvduplex_connector.holder import Holder
from kvduplex_connector.pool import PinnedPool
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.params import RETENTION_KEY, Retention
from kvduplex_transfer.leases.records import Grant, LeaseLimits
from kvduplex_transfer.leases.table import LeaseTable

Requests = Callable[..., Any]
KEEP = Retention("lease", 30)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def holder(pool: Any, clock: Clock) -> Holder:
    table = LeaseTable(limits=LeaseLimits(budget_blocks=32), clock=clock)
    return Holder(table=table, pool=PinnedPool(pool), block_size=4, watermark=4)


def finish(holder: Holder, pool: Any, request: Any, retention: Retention = KEEP) -> dict[str, Any] | None:
    """End a request as the scheduler does: the connector is asked, then the request's own references go."""
    blocks = pool.allocate(-(-request.num_tokens // 4))
    receipt = holder.finished(request, blocks, retention)
    pool.free_blocks([pool.blocks[block] for block in blocks])
    return receipt


def test_only_blocks_with_every_token_computed_are_kept(holder: Holder, pool: Any, request_of: Requests) -> None:
    receipt = finish(holder, pool, request_of(list(range(16)), output=3))
    assert receipt == {RETENTION_KEY: {"id": "lease", "tokens": 12}}  # the 16th token has no KV yet
    assert pool.get_num_free_blocks() == 64 - 3


def test_a_step_in_flight_is_not_trusted(holder: Holder, pool: Any, request_of: Requests) -> None:
    request = request_of(list(range(17)), output=1, computed=17, num_in_flight_tokens=6)
    assert finish(holder, pool, request) == {RETENTION_KEY: {"id": "lease", "tokens": 8}}


@pytest.mark.parametrize("status", ["FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_REPETITION"])
def test_an_aborted_answer_keeps_what_it_has(holder: Holder, pool: Any, request_of: Requests, status: str) -> None:
    receipt = finish(holder, pool, request_of(list(range(17)), output=2, finished=status))
    assert receipt == {RETENTION_KEY: {"id": "lease", "tokens": 16}}


@pytest.mark.parametrize(
    ("output", "status"),
    [(0, "FINISHED_ABORTED"), (3, "FINISHED_ERROR"), (3, "FINISHED_IGNORED")],
    ids=["loading or prefilling", "failed", "too long"],
)
def test_requests_without_sound_kv_keep_nothing(
    holder: Holder, pool: Any, request_of: Requests, output: int, status: str
) -> None:
    receipt = finish(holder, pool, request_of(list(range(17)), output=output, finished=status))
    assert receipt == {RETENTION_KEY: {"id": "lease", "tokens": 0}}
    assert pool.get_num_free_blocks() == 64


def test_a_preempted_request_keeps_nothing(holder: Holder, pool: Any, request_of: Requests) -> None:
    holder.finished(request_of(list(range(17)), output=2, computed=0), [], KEEP)
    assert pool.get_num_free_blocks() == 64


def test_placeholder_blocks_end_what_is_kept(holder: Holder, pool: Any, request_of: Requests) -> None:
    one, two = pool.allocate(2)
    assert holder.finished(request_of(list(range(17)), output=1), [one, 0, two], KEEP) == {
        RETENTION_KEY: {"id": "lease", "tokens": 4}
    }


def test_a_request_that_nobody_continues_keeps_nothing(holder: Holder, pool: Any, request_of: Requests) -> None:
    assert finish(holder, pool, request_of(list(range(17)), output=2), Retention.none()) is None
    assert pool.get_num_free_blocks() == 64


def test_lapsed_leases_give_their_blocks_back_last_block_first(
    holder: Holder, pool: Any, request_of: Requests, clock: Clock
) -> None:
    finish(holder, pool, request_of(list(range(17)), output=2))
    pool.freed.clear()
    clock.now = 31
    holder.tick()
    assert pool.freed == [4, 3, 2, 1]
    assert pool.get_num_free_blocks() == 64


def test_a_later_turn_under_the_same_id_never_frees_what_it_shares(
    holder: Holder, pool: Any, request_of: Requests
) -> None:
    first = pool.allocate(4)
    holder.finished(request_of(list(range(17)), output=2), first, KEEP)
    pool.free_blocks([pool.blocks[block] for block in first])
    pool.touch([pool.blocks[block] for block in first])  # the next turn hits the prefix cache
    longer = [*first, *pool.allocate(2)]
    holder.finished(request_of(list(range(25)), output=2), longer, KEEP)
    pool.free_blocks([pool.blocks[block] for block in longer])
    assert [pool.blocks[block].ref_cnt for block in longer] == [1] * 6
    holder.table.release(["lease"])
    holder.collect()
    assert pool.get_num_free_blocks() == 64


def test_held_leases_make_room_for_a_request(holder: Holder, pool: Any, request_of: Requests) -> None:
    for number in range(4):
        tokens = [number * 100 + token for token in range(32)]
        finish(holder, pool, request_of(tokens, output=2), Retention(f"lease-{number}", 30))
    assert pool.get_num_free_blocks() == 64 - 4 * 7
    holder.make_room(request_of(list(range(4 * 40))), 0)
    assert pool.get_num_free_blocks() >= 40 + 4
    assert holder.table.renew([f"lease-{number}" for number in range(4)]) == ["lease-2", "lease-3"]


def test_a_request_that_comes_back_gets_more_and_in_the_end_everything(
    holder: Holder, pool: Any, request_of: Requests
) -> None:
    for number in range(4):
        tokens = [number * 100 + token for token in range(32)]
        finish(holder, pool, request_of(tokens, output=2), Retention(f"lease-{number}", 30))
    small = request_of(list(range(8)))
    holder.make_room(small, 0)
    assert holder.table.snapshot().held == 4
    for _ in range(70):
        holder.make_room(small, 0)
    assert holder.table.snapshot().held == 0


def test_claimed_leases_are_not_touched_under_pressure(holder: Holder, pool: Any, request_of: Requests) -> None:
    request = request_of(list(range(17)), output=2)
    finish(holder, pool, request)
    assert isinstance(holder.table.claim((b"p", 1), "lease", HashChain.of(request.block_hashes)), Grant)
    for _ in range(70):
        holder.make_room(request_of(list(range(4 * 64))), 0)
    assert not holder.relieve()
    assert pool.get_num_free_blocks() == 60
    holder.table.finish((b"p", 1), consumed=True)
    holder.tick()
    assert pool.get_num_free_blocks() == 64


def test_leases_go_before_a_running_request(holder: Holder, pool: Any, request_of: Requests) -> None:
    assert not holder.relieve()
    finish(holder, pool, request_of(list(range(17)), output=2))
    assert holder.relieve()
    assert pool.get_num_free_blocks() == 64


def test_the_watermark_is_kept_free(holder: Holder, pool: Any, request_of: Requests) -> None:
    finish(holder, pool, request_of(list(range(17)), output=2))
    pool.allocate(58)
    assert pool.get_num_free_blocks() == 2
    holder.tick()
    assert pool.get_num_free_blocks() == 6


def test_resetting_the_prefix_cache_drops_leases_first(holder: Holder, pool: Any, request_of: Requests) -> None:
    request = request_of(list(range(17)), output=2)
    finish(holder, pool, request)
    assert pool.reset_prefix_cache()
    assert holder.table.snapshot().held == 0
    finish(holder, pool, request)
    holder.table.claim((b"p", 1), "lease", HashChain.of(request.block_hashes))
    assert not pool.reset_prefix_cache(), "a lease that is being read holds a reset up"
