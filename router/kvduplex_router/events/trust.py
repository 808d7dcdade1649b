"""How far an engine's part of the index may be believed.

What events say is checked against what engines say: the cached tokens of a request that was predicted. Complete events
make an engine trusted. Lost events, events that began before we listened, or predictions that keep being wrong make it
untrusted, and then routing estimates from its own memory of what it sent there.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["Trust", "TrustKeeper"]

_WINDOW: Final = 16
_WRONG_AT: Final = 0.5
_RIGHT_AT: Final = 0.1
_WORTH_TOKENS: Final = 64


class Trust(StrEnum):
    """State of an engine's part of the index."""

    SILENT = "silent"
    """It publishes no events, or none have come yet."""
    TRUSTED = "trusted"
    UNTRUSTED = "untrusted"


class TrustKeeper:
    """One engine's trust.

    Attributes:
        state: See `Trust`.
        error: Running mean of how far predictions were off, as a part of the prompt; 0 is exact.
    """

    __slots__ = ("_judged", "error", "state")

    def __init__(self) -> None:
        self.state = Trust.SILENT
        self.error = 0.0
        self._judged = 0

    def complete(self) -> None:
        """Everything the engine holds is known: its events were seen from the first, or it cleared its cache."""
        self.state = Trust.TRUSTED
        self._restart()

    def incomplete(self) -> None:
        """Events were lost, or sent before we listened."""
        self.state = Trust.UNTRUSTED
        self._restart()

    def silent(self) -> None:
        """There is nobody to hear."""
        self.state = Trust.SILENT
        self._restart()

    def judge(self, predicted: int, reported: int, prompt: int) -> bool:
        """Compare a prediction with the engine's own count, in tokens.

        Returns:
            Whether the engine has just lost trust, so that its part of the index is to be made anew.
        """
        if self.state is Trust.SILENT or prompt < _WORTH_TOKENS:
            return False
        self._judged += 1
        weight = 1 / min(self._judged, _WINDOW)
        self.error += weight * (abs(predicted - reported) / prompt - self.error)
        if self._judged < _WINDOW:
            return False
        if self.state is Trust.TRUSTED and self.error > _WRONG_AT:
            self.incomplete()
            return True
        if self.state is Trust.UNTRUSTED and self.error < _RIGHT_AT:
            self.state = Trust.TRUSTED
        return False

    def _restart(self) -> None:
        self.error = 0.0
        self._judged = 0
