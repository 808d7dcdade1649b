"""What a client is told about a turn besides its answer; engine names and addresses stay in the log."""

from __future__ import annotations

import secrets
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from kvduplex_router.errors import BadGatewayError, GatewayTimeoutError, RouterError, UnavailableError
from kvduplex_router.pd.hop import HopFailedError
from kvduplex_router.pd.request import Receipt, TurnRequest

__all__ = ["client_error", "response_headers"]

_TIMEOUT_STATUSES: Final = frozenset({504})
_UNAVAILABLE_STATUSES: Final = frozenset({503})


_SECRET: Final = secrets.token_bytes(16)


@lru_cache(maxsize=4096)
def _tag(engine: str) -> str:
    """What tells engines apart without telling which they are; good for this process's lifetime."""
    return blake2b(engine.encode("utf-8", "surrogatepass"), digest_size=4, key=_SECRET).hexdigest()


def response_headers(request: TurnRequest, receipt: Receipt) -> dict[str, str]:
    """Headers of an answer."""
    headers = {"x-request-id": request.request_id, "x-kvduplex-plan": receipt.plan}
    if receipt.engines:
        headers["x-kvduplex-engine"] = _tag(receipt.engines[-1])
    if receipt.cached_tokens is not None:
        headers["x-kvduplex-cached-tokens"] = str(receipt.cached_tokens)
    return headers


def client_error(error: HopFailedError) -> RouterError:
    """The error for an engine's failure."""
    who = f"the {error.engine.role.value} engine"
    if error.reason == "timeout" or error.status in _TIMEOUT_STATUSES:
        return GatewayTimeoutError(f"{who} did not answer in time", reason=error.reason)
    if error.status in _UNAVAILABLE_STATUSES:
        wait = int(error.retry_after) if error.retry_after is not None else None
        return UnavailableError(f"{who} is overloaded; try again later", retry_after_s=wait, reason=error.reason)
    told = {"connect": "cannot be reached", "broken": "broke off before it answered", "status": "failed"}
    return BadGatewayError(f"{who} {told.get(error.reason, 'gave no usable answer')}", reason=error.reason)
