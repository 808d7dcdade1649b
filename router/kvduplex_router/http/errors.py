"""How an exchange with an engine can fail, told apart by what the engine may have consumed."""

from __future__ import annotations

__all__ = [
    "AnswerTooLargeError",
    "BrokenAnswerError",
    "ConnectError",
    "ExchangeError",
    "StaleConnectionError",
    "StalledError",
]


class ExchangeError(Exception):
    """Base of every failure of one HTTP exchange.

    Attributes:
        consumed: Whether the engine may have read the request.
    """

    consumed = True


class ConnectError(ExchangeError):
    """No connection came up, so the engine has seen nothing."""

    consumed = False


class BrokenAnswerError(ExchangeError):
    """The connection ended or turned to nonsense before the answer was complete."""


class StaleConnectionError(BrokenAnswerError):
    """A pooled connection turned out to be closed: most likely it was idle too long, and the engine saw nothing."""


class StalledError(ExchangeError):
    """The engine kept silent past a limit."""


class AnswerTooLargeError(ExchangeError):
    """The answer grew past the limit set for reading it whole."""
