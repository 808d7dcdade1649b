"""Turns that come after the decode engine gave the blocks up."""

from __future__ import annotations

import time
import uuid

import pytest
from tests.e2e.rig import SHORT_TTL_S, Rig, reused
from tests.e2e.test_conversations import next_turn, opening

pytestmark = pytest.mark.engine


def test_a_late_turn_is_computed_and_equals_a_plain_engines(forgetful: Rig) -> None:
    conversation = f"late-{uuid.uuid4()}"
    messages = opening(conversation)
    first = forgetful.router.answer(messages, conversation_id=conversation)
    turn = next_turn(messages, first["content"], "Are you still there?")
    time.sleep(SHORT_TTL_S + 1)  # the subject of this test is time itself
    before = forgetful.prefill_metrics()
    got = forgetful.router.answer(turn, conversation_id=conversation)
    assert got["token_ids"] == forgetful.plain.answer(turn)["token_ids"]
    assert reused(forgetful.prefill_metrics().since(before)) == 0


def test_a_turn_in_time_is_reused_on_the_same_cluster(forgetful: Rig) -> None:
    conversation = f"early-{uuid.uuid4()}"
    messages = opening(conversation)
    first = forgetful.router.answer(messages, conversation_id=conversation)
    before = forgetful.prefill_metrics()
    turn = next_turn(messages, first["content"], "Are you still there?")
    got = forgetful.router.answer(turn, conversation_id=conversation)
    assert got["token_ids"] == forgetful.plain.answer(turn)["token_ids"]
    assert reused(forgetful.prefill_metrics().since(before)) > 0
