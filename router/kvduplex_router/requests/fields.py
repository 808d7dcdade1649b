"""The request fields the router owns, and how a client is kept from setting them."""

from __future__ import annotations

from typing import Final

import msgspec

from kvduplex_router.errors import BadRequestError
from kvduplex_router.requests.body import Body, decode_members

__all__ = ["CONVERSATION_ID", "KV_PARAMS", "OWNED", "client_extras"]

KV_PARAMS: Final = "kv_transfer_params"
CONVERSATION_ID: Final = "conversation_id"

_RANKS: Final = ("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank")
OWNED: Final = frozenset({KV_PARAMS, "ec_transfer_params", CONVERSATION_ID, *_RANKS})
"""Never taken over from a client: engines dial whatever hosts transfer parameters name, and ranks are the router's."""

_XARGS: Final = "vllm_xargs"


def client_extras(body: Body) -> dict[str, bytes]:
    """Replacements for members in which a client may have nested an owned field; empty when it has not.

    vLLM copies ``vllm_xargs`` into the same place from which connectors read transfer parameters.
    """
    if _XARGS not in body:
        return {}
    try:
        inner: dict[str, bytes | msgspec.Raw] = dict(decode_members(body.raw(_XARGS)))
    except BadRequestError:
        return {}  # not an object: the engine refuses it
    if OWNED.isdisjoint(inner):
        return {}
    return {_XARGS: Body(inner, 0).render(without=OWNED)}
