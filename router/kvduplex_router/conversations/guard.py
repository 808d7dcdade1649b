"""May this reference serve this request? The reasons are a closed list and label a metric."""

from __future__ import annotations

from enum import StrEnum

from kvduplex_router.conversations.answer import answer_digest, text_digest
from kvduplex_router.conversations.history import ChatHistory, TextHistory
from kvduplex_router.conversations.reference import Reference

__all__ = ["Refusal", "stock_refusal"]


class Refusal(StrEnum):
    """Why a turn did not use KV from its last one."""

    FIRST_TURN = "first_turn"
    EXPIRED = "expired"
    LEASE_LOST = "lease_lost"
    ENGINE_GONE = "engine_gone"
    ENGINE_RESTARTED = "engine_restarted"
    HISTORY_CHANGED = "history_changed"
    ANSWER_CHANGED = "answer_changed"
    NOT_SPLIT = "not_split"
    OFF = "off"


def stock_refusal(reference: Reference, history: ChatHistory | TextHistory | None) -> Refusal | None:
    """Whether a request extends the referenced turn exactly, as stock engines need; None when it does.

    Stock engines read whatever blocks they are pointed at, so everything that can be known here must be equal: the
    earlier request's history and everything else that shapes the prompt, then the answer as it was generated.
    """
    end, answer = reference.history, reference.answer
    if history is None or end is None or history.at(end.length) != end.digest:
        return Refusal.HISTORY_CHANGED
    if answer is None:
        return Refusal.ANSWER_CHANGED
    following = history.answer_after(end.length)
    if isinstance(history, TextHistory):
        same = text_digest(following[: answer.length]) == answer.digest and len(following) > answer.length
    else:
        same = answer_digest(following) == answer.digest
    return None if same else Refusal.ANSWER_CHANGED
