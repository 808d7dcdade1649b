"""Why a prompt cannot be rendered here; the reasons label a metric."""

from __future__ import annotations

__all__ = ["NotRenderableError"]


class NotRenderableError(Exception):
    """The engine may well answer the request, but its tokens cannot be worked out here.

    Attributes:
        reason: ``content`` (images, audio, unknown parts), ``api`` (an API whose prompt the engine makes up),
            ``template`` (it refused the messages) or ``shape`` (members of unexpected types).
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
