"""Errors of a provisioned machine, each explained by the command line and shown in the unit's log."""

from __future__ import annotations

from kvduplex.errors import KvduplexError, PreflightError

__all__ = [
    "AwsError",
    "DiscoveryError",
    "ManifestError",
    "MetadataServiceError",
    "SecretError",
    "WeightsError",
]


class ManifestError(PreflightError):
    """The image manifest is missing or damaged."""


class MetadataServiceError(PreflightError):
    """The EC2 instance metadata service does not answer, or lacks what was asked."""


class AwsError(KvduplexError):
    """An AWS call failed; the message names the call, the reason and the permission or setting to change."""


class SecretError(AwsError):
    """A secret key cannot be read. The message never holds the key."""


class WeightsError(AwsError):
    """Weights or compiled graphs cannot be copied to this machine."""


class DiscoveryError(AwsError):
    """Engines cannot be looked up."""
