"""The connector's parts against the vLLM that is installed, without starting it."""

from __future__ import annotations

from typing import Any

import pytest

from kvduplex_connector.pool import PinnedPool

pytestmark = pytest.mark.engine


@pytest.fixture
def pool() -> Any:
    module = pytest.importorskip("vllm.v1.core.block_pool", exc_type=ImportError)
    return module.BlockPool(20, enable_caching=True, hash_block_size=16)


def test_pinned_blocks_outlive_their_request_and_come_back(pool: Any) -> None:
    pinned = PinnedPool(pool)
    blocks = pool.get_new_blocks(5)
    ids = [block.block_id for block in blocks]
    pinned.pin(ids[:3])
    pool.free_blocks(reversed(blocks))
    assert (pinned.total, pinned.free) == (19, 16)
    assert not {block.block_id for block in pool.get_new_blocks(16)} & set(ids[:3])
    pinned.unpin(reversed(ids[:3]))
    assert pinned.free == 3


def test_a_reset_is_refused_while_blocks_are_pinned_unless_they_are_given_back_first(pool: Any) -> None:
    pinned = PinnedPool(pool)
    (block,) = pool.get_new_blocks(1)
    assert not pool.reset_prefix_cache()
    pinned.before_reset(lambda: pinned.unpin([block.block_id]))
    assert pool.reset_prefix_cache()


def test_placeholders_are_not_counted(pool: Any) -> None:
    pinned = PinnedPool(pool)
    (one, two) = (block.block_id for block in pool.get_new_blocks(2))
    assert pinned.usable_prefix([one, pool.null_block.block_id, two], 3) == 1
    assert pinned.usable_prefix([one, two], 5) == 2
    assert pinned.cached_prefix([b"x" * 32]) == 0


@pytest.fixture
def connectors() -> Any:
    return pytest.importorskip("kvduplex_connector.connector", exc_type=ImportError)


def test_any_registered_pull_connector_has_a_leased_form(connectors: Any) -> None:
    leased = connectors.LeasedNixlPullConnector
    assert leased is connectors.LeasedNixlPullConnector
    assert issubclass(leased, connectors.LeasedConnector)
    assert issubclass(leased, connectors.NixlPullConnector)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LeasedNeuronNixlConnector", "knows no connector NeuronNixlConnector"),
        ("LeasedNixlPushConnector", "does not pull over NIXL"),
        ("Unleashed", "has no attribute Unleashed"),
    ],
)
def test_other_names_say_what_is_missing(connectors: Any, name: str, why: str) -> None:
    with pytest.raises(AttributeError, match=why):
        getattr(connectors, name)
