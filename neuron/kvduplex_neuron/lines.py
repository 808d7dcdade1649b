"""The lines of the vLLM Neuron plugin, what each runs on and what it can do with KV.

Sources: the vLLM Neuron setup guide and disaggregated inference design document (Neuron SDK 2.31 to 2.33), the NxD
Inference release notes (SDK 2.28: plugin 0.4.1, vLLM 0.13.0; SDK 2.29: plugin 0.5.0, "pin to Neuron SDK 2.28 for
Trn1/Inf2"), and NIXL's list of Neuron devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from kvduplex_transfer.recipes import Direction

__all__ = ["LINES", "Family", "PluginLine", "family_of_device", "family_of_instance", "line_of"]


class Family(StrEnum):
    """Generation of Neuron hardware."""

    INF2 = "inf2"
    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"


@dataclass(frozen=True, slots=True)
class PluginLine:
    """One line of releases.

    Attributes:
        name: Leading part of its version.
        plugin: Versions of ``vllm-neuron``.
        vllm: Versions of vLLM that it is made for.
        sdk: Neuron SDK release that ships it.
        families: Hardware it supports.
        direction: Which way KV can move between its engines.
        leased: Whether kvduplex's own connector supports its vLLM.
    """

    name: str
    plugin: SpecifierSet
    vllm: SpecifierSet
    sdk: str
    families: frozenset[Family]
    direction: Direction
    leased: bool


def _line(name: str, vllm: str, sdk: str, families: set[Family], direction: Direction, *, leased: bool) -> PluginLine:
    major, minor = name.split(".")
    plugin = SpecifierSet(f">={name},<{major}.{int(minor) + 1}")
    return PluginLine(name, plugin, SpecifierSet(vllm), sdk, frozenset(families), direction, leased)


_CURRENT = {Family.TRN2, Family.TRN3}

LINES = (
    _line("0.29", ">=0.29,<0.30", "2.33", _CURRENT, Direction.BIDIRECTIONAL, leased=True),
    _line("0.24", ">=0.24,<0.25", "2.32", _CURRENT, Direction.BIDIRECTIONAL, leased=False),
    _line("0.21", ">=0.21,<0.22", "2.31", _CURRENT, Direction.ONE_WAY, leased=False),
    _line("0.5", ">=0.16,<0.17", "2.29", {Family.TRN2}, Direction.NONE, leased=False),
    _line("0.4", ">=0.13,<0.14", "2.28", {Family.TRN1, Family.TRN2, Family.INF2}, Direction.NONE, leased=False),
)
"""Newest first."""

_PCI_DEVICES = {
    "0x7264": Family.INF2,
    "0x7164": Family.TRN1,
    "0x7364": Family.TRN2,
    "0x7564": Family.TRN3,
    "0x7565": Family.TRN3,
}


def line_of(version: str | None) -> PluginLine | None:
    """The line that a version of ``vllm-neuron`` belongs to."""
    if version is None:
        return None
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    return next((line for line in LINES if line.plugin.contains(parsed, prereleases=True)), None)


def family_of_device(pci_device: str) -> Family | None:
    """Generation of a PCI device id of vendor 0x1d0f, e.g. ``0x7364``."""
    return _PCI_DEVICES.get(pci_device)


def family_of_instance(name: str) -> Family | None:
    """Generation of an EC2 instance type, e.g. ``trn1n.32xlarge``."""
    return next((family for family in Family if name.startswith(family.value)), None)
