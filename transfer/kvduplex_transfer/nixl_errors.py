"""NIXL's flat error classes mapped onto this package's tree.

The classes exist only where NIXL is installed, so they are known by name; a test compares this list with NIXL's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from kvduplex_transfer.errors import (
    BackendUnavailableError,
    InvalidDescriptorError,
    MetadataError,
    PeerLostError,
    TransferError,
    TransferFailedError,
    UnknownPeerError,
)

__all__ = ["NIXL_ERRORS", "nixl_call"]

NIXL_ERRORS: Mapping[str, type[TransferError]] = MappingProxyType(
    {
        "nixlBackendError": TransferFailedError,
        "nixlCancelledError": PeerLostError,  # UCX cancels what is in flight when an endpoint fails
        "nixlInvalidParamError": InvalidDescriptorError,
        "nixlMismatchError": MetadataError,
        "nixlNoTelemetryError": BackendUnavailableError,
        "nixlNotAllowedError": MetadataError,  # connection info that contradicts what is loaded
        "nixlNotFoundError": UnknownPeerError,
        "nixlNotPostedError": TransferFailedError,
        "nixlNotSupportedError": BackendUnavailableError,
        "nixlRemoteDisconnectError": PeerLostError,
        "nixlRepostActiveError": TransferFailedError,
        "nixlUnknownError": TransferFailedError,
    }
)
"""Meaning of each class of NIXL 1.5, unless the call that raised it says otherwise."""

_NOTHING: Mapping[str, type[TransferError]] = MappingProxyType({})


@contextmanager
def nixl_call(action: str, meaning: Mapping[str, type[TransferError]] = _NOTHING, *, hint: str = "") -> Iterator[None]:
    """Raise NIXL's errors as ours.

    Args:
        action: What is being done, for the message, e.g. ``register 3 regions of DRAM``.
        meaning: What a class means here, where that differs from `NIXL_ERRORS`.
        hint: What to do about a failure, where that is known.

    Raises:
        TransferError: The mapped class, from the original.
    """
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        mapped = meaning.get(kind) or NIXL_ERRORS.get(kind)
        if mapped is None:
            raise
        # Without its traceback, whose frames hold NIXL's handles and through them the agent, long after its end.
        advice = f"; {hint}" if hint else ""
        raise mapped(f"cannot {action}: {kind}: {error}{advice}") from error.with_traceback(None)
