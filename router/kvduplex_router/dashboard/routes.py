"""``/dashboard`` and the events behind it."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from kvduplex_router.dashboard.feed import Feed

__all__ = ["dashboard_router"]

_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def dashboard_router(feed: Feed) -> APIRouter:
    """The page, which holds no data, and its data, which the guard keeps behind the operators' key."""
    router = APIRouter(tags=["admin"])
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    headers = {"content-security-policy": _policy(page), "cache-control": "no-store", "x-frame-options": "DENY"}

    @router.get("/dashboard", summary="The fleet in a browser", response_class=Response)
    async def dashboard() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/dashboard/events", summary="What the page shows, as server-sent events", response_class=Response)
    async def events() -> StreamingResponse:
        return StreamingResponse(
            feed.events(),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    return router


def _policy(page: str) -> str:
    """Nothing may be loaded or run but what stands in the page itself."""
    digests: dict[str, str] = {}
    for kind, text in _INLINE.findall(page):
        digests[kind] = f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    return (
        f"default-src 'none'; script-src {digests['script']}; style-src {digests['style']}; connect-src 'self'; "
        "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    )
