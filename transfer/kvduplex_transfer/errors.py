"""The one error tree of the transfer room.

Every error that leaves this package is a `TransferError`. NIXL's flat error classes are mapped onto it in
`kvduplex_transfer.nixl_errors`, each raised `from` the original, so that callers never name a vendor class.
"""

from __future__ import annotations

__all__ = [
    "AgentClosedError",
    "BackendUnavailableError",
    "ConfigError",
    "InvalidDescriptorError",
    "MetadataError",
    "PeerLostError",
    "SilentFallbackError",
    "TransferError",
    "TransferFailedError",
    "TransferTimeoutError",
    "UnknownPeerError",
]


class TransferError(Exception):
    """Base of every error raised by kvduplex_transfer."""


class ConfigError(TransferError):
    """A setting is wrong; the message names key, value and allowed range."""


class BackendUnavailableError(TransferError):
    """This host cannot run the backend: a package, plugin or device is missing."""


class SilentFallbackError(BackendUnavailableError):
    """NIXL came up, but on something slower or less capable than was asked for."""


class InvalidDescriptorError(TransferError):
    """A memory region or block list does not fit what was registered."""


class MetadataError(TransferError):
    """A peer's metadata could not be decoded, or belongs to this agent itself."""


class UnknownPeerError(TransferError):
    """No peer of that name was added, or it was removed."""


class PeerLostError(TransferError):
    """The peer is gone: refused, reset, or cancelled by it. Its blocks must be treated as not read."""


class TransferFailedError(TransferError):
    """A read ended in an error state. The destination's bytes are undefined."""


class TransferTimeoutError(TransferError):
    """A deadline passed while an operation was still running."""


class AgentClosedError(TransferError):
    """The agent was closed; open a new one."""
