"""The order of events, without sockets: whatever is lost on the way, the index ends up right or untrusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.events.feed import Feed
from kvduplex_router.events.hashing import chain, root, token_bytes
from kvduplex_router.events.index import BlockIndex
from kvduplex_router.events.trust import Trust, TrustKeeper

END = b"\xff" * 8


class Rig:
    """A feed whose replays are kept until `replay` lets them through."""

    def __init__(self, *, replays: bool = True) -> None:
        self.now = 0.0
        self.index = BlockIndex(max_blocks=1_000)
        self.trust = TrustKeeper()
        self.asked: list[int] = []
        ask: Callable[[int], None] | None = self.asked.append if replays else None
        self.feed = Feed("e", index=self.index, trust=self.trust, clock=lambda: self.now, ask=ask)
        self.sent: list[bytes] = []

    def send(self, *, lose: bool = False, **event: Any) -> None:
        number = len(self.sent)
        self.sent.append(msgspec.msgpack.encode([0, [event], 0]))
        if not lose:
            self.feed.message([b"", number.to_bytes(8, "big"), self.sent[number]])

    def store(self, token: int, *, lose: bool = False) -> None:
        self.send(
            lose=lose,
            type="BlockStored",
            block_hashes=[token + 100],
            parent_block_hash=None,
            token_ids=[token],
            block_size=1,
        )

    def remove(self, token: int, *, lose: bool = False) -> None:
        self.send(lose=lose, type="BlockRemoved", block_hashes=[token + 100])

    def replay(self) -> None:
        while self.asked:
            start = self.asked.pop(0)
            for number in range(start, len(self.sent)):
                self.feed.replayed([b"", b"", number.to_bytes(8, "big"), self.sent[number]])
            self.feed.replayed([b"", b"", END, b""])

    def holds(self) -> set[int]:
        return {t for t in range(8) if self.index.overlaps(chain(root(1), token_bytes([t]), 1))}


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "replay"]), st.integers(0, 7), st.booleans()), max_size=50
)


@given(STEPS, st.booleans(), st.booleans())
def test_a_trusted_index_is_right_whatever_was_lost(
    steps: list[tuple[str, int, bool]], replays: bool, slow: bool
) -> None:
    rig = Rig(replays=replays)
    rig.feed.connected()
    if not slow:
        rig.replay()
    held: set[int] = set()
    for step, token, lose in steps:
        if step == "replay":
            rig.replay()
        elif step == "store" and token not in held:
            held.add(token)
            rig.store(token, lose=lose)
        elif step == "remove" and token in held:
            held.discard(token)
            rig.remove(token, lose=lose)
    rig.send(type="Nothing")  # so that the last loss is noticed
    rig.replay()
    assert rig.holds() == held if replays else rig.holds() <= held
    assert rig.trust.state is Trust.TRUSTED if replays else True
    assert rig.feed.counts.restarts == 0


def test_a_replay_that_does_not_end_is_given_up() -> None:
    rig = Rig()
    rig.feed.connected()
    rig.store(1)
    rig.now = 4.9
    rig.feed.tick()
    assert rig.feed.replaying
    rig.now = 5.1
    rig.feed.tick()
    assert rig.trust.state is Trust.UNTRUSTED
    assert rig.holds() == {1}, "what arrived meanwhile counts"
    rig.store(2)
    assert rig.holds() == {1, 2}


def test_predictions_that_keep_being_wrong_cost_trust_and_right_ones_restore_it() -> None:
    trust = TrustKeeper()
    trust.complete()
    lost = [trust.judge(900, 0, 1_000) for _ in range(16)]
    assert lost == [False] * 15 + [True]
    assert trust.state is Trust.UNTRUSTED
    for _ in range(16):
        assert not trust.judge(500, 500, 1_000)
    assert trust.state.value == "trusted"


def test_short_prompts_and_silent_engines_are_not_judged() -> None:
    trust = TrustKeeper()
    for _ in range(50):
        assert not trust.judge(900, 0, 1_000)
    trust.complete()
    for _ in range(50):
        assert not trust.judge(60, 0, 60)
    assert trust.state is Trust.TRUSTED


def test_only_the_first_group_that_keeps_whole_prompts_is_indexed() -> None:
    rig = Rig(replays=False)
    common: dict[str, Any] = {"type": "BlockStored", "parent_block_hash": None, "block_size": 1}
    rig.send(**common, block_hashes=[1], token_ids=[1], group_idx=0, kv_cache_spec_kind="sliding_window")
    rig.send(**common, block_hashes=[2], token_ids=[2], group_idx=1, kv_cache_spec_kind="full_attention")
    rig.send(**common, block_hashes=[3], token_ids=[3], group_idx=2, kv_cache_spec_kind="full_attention")
    rig.send(**common, block_hashes=[4], token_ids=[4], group_idx=1, medium="CPU")
    assert rig.holds() == {2}
    assert rig.index.counts.other == 3
