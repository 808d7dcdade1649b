"""The lease room's branch of the error tree."""

from __future__ import annotations

from kvduplex_transfer.errors import ConfigError, TransferError

__all__ = ["InvalidLeaseError", "LeaseConfigError", "LeaseError", "LeaseUnreachableError", "MalformedFrameError"]


class LeaseError(TransferError):
    """Base of every error raised by kvduplex_transfer.leases."""


class InvalidLeaseError(LeaseError, ValueError):
    """A lease id, duration or endpoint is malformed; the message names the value and what is allowed."""


class LeaseUnreachableError(LeaseError):
    """A lease endpoint did not answer before its deadline."""


class LeaseConfigError(LeaseError, ConfigError):
    """A lease setting is wrong; the message names key, value and allowed range."""


class MalformedFrameError(LeaseError):
    """Bytes that are no frame of this version.

    Attributes:
        reason: Metric label: ``magic``, ``version`` or ``content``.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
