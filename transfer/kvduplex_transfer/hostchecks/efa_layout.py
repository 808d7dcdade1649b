"""Which network interfaces an instance must be launched with so that every EFA it has is there. Pure.

EC2 gives an instance only the interfaces that its launch request names, and adds none later: an accelerator
instance launched with one interface has one EFA, or none, and KV crosses the network at a fraction of its speed.

Sources: EC2 user guide, "Maximize network bandwidth with EFA" (``efa-acc-inst-types``): card 0 carries the primary
interface, which cannot be ``efa-only``; the other cards carry EFA devices without IP. The older layout, which
eksctl and ParallelCluster used before ``efa-only`` existed, gives each card one ``efa`` interface with an address.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.hostchecks.instances import INSTANCE_TYPES, InstanceType, instance_type_named

__all__ = ["EfaLayout", "InterfaceType", "NetworkInterface", "network_interfaces"]


class EfaLayout(StrEnum):
    """The two arrangements that EC2 accepts."""

    A = "A"
    """Card 0 device 0 ``interface``, card 0 device 1 ``efa-only``, every other card device 0 ``efa-only``."""
    B = "B"
    """Card 0 device 0 ``efa``, every other card device 1 ``efa``; needs an IP address for each card."""


class InterfaceType(StrEnum):
    """``InterfaceType`` of the EC2 API."""

    INTERFACE = "interface"
    EFA = "efa"
    EFA_ONLY = "efa-only"


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """One entry of ``NetworkInterfaces`` in a launch template or a RunInstances request."""

    card: int
    device: int
    type: InterfaceType

    @property
    def has_address(self) -> bool:
        """Whether it takes an IP address of the subnet."""
        return self.type is not InterfaceType.EFA_ONLY


def network_interfaces(instance_type: str, layout: EfaLayout = EfaLayout.A) -> tuple[NetworkInterface, ...]:
    """Interfaces to launch `instance_type` with, primary first; a single plain one on a type without EFA.

    Raises:
        ConfigError: The table knows no number of EFA interfaces for the type.
    """
    cards = _efa_cards(instance_type)
    if cards == 0:
        return (NetworkInterface(0, 0, InterfaceType.INTERFACE),)
    if layout is EfaLayout.B:
        return tuple(NetworkInterface(card, min(card, 1), InterfaceType.EFA) for card in range(cards))
    others = (NetworkInterface(card, 0, InterfaceType.EFA_ONLY) for card in range(1, cards))
    primary = NetworkInterface(0, 0, InterfaceType.INTERFACE)
    return (primary, NetworkInterface(0, 1, InterfaceType.EFA_ONLY), *others)


def _efa_cards(instance_type: str) -> int:
    row = instance_type_named(instance_type)
    if row is None:
        return _plain_or_refused(instance_type)
    if row.efa_interfaces is None:
        raise ConfigError(
            f"instance type {instance_type}: its number of EFA interfaces is not published; choose one of "
            f"{', '.join(_with_efa())}"
        )
    return row.efa_interfaces


def _plain_or_refused(instance_type: str) -> int:
    # Types of these families are for routers and CPU engines; the sizes that have EFA are used without it.
    if instance_type.split(".", 1)[0][:1] in {"c", "m", "r", "t"}:
        return 0
    raise ConfigError(
        f"instance type {instance_type}: not in the table of known types; choose one of {', '.join(_with_efa())}"
    )


def _with_efa() -> list[str]:
    def rank(row: InstanceType) -> int:
        return row.efa_interfaces or 0

    return sorted(row.name for row in INSTANCE_TYPES.values() if rank(row))
