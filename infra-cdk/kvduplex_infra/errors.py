"""Everything this package refuses, in one tree."""

from __future__ import annotations

__all__ = ["ClusterFileError", "InfraError", "TemplateError"]


class InfraError(Exception):
    """Base of every error of this package; the message says what, where and what to do."""


class ClusterFileError(InfraError):
    """A cluster file is wrong; every line of the message names the file, a key, its value and the remedy."""


class TemplateError(InfraError):
    """A synthesised template would not do on EC2 what it says."""
