"""The generating APIs."""

from __future__ import annotations

from typing import Final

from kvduplex_router.requests.apis.chat import CHAT
from kvduplex_router.requests.apis.completions import COMPLETIONS
from kvduplex_router.requests.apis.messages import MESSAGES
from kvduplex_router.requests.apis.responses import RESPONSES
from kvduplex_router.requests.kinds import ApiKind

__all__ = ["ALL", "CHAT", "COMPLETIONS", "MESSAGES", "RESPONSES"]

ALL: Final[tuple[ApiKind, ...]] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
