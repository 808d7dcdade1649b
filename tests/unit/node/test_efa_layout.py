"""The interfaces that instances are launched with."""

from __future__ import annotations

import pytest

from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.hostchecks.efa_layout import EfaLayout, InterfaceType, network_interfaces
from kvduplex_transfer.hostchecks.instances import INSTANCE_TYPES

WITH_EFA = sorted(name for name, row in INSTANCE_TYPES.items() if row.efa_interfaces)


def test_the_current_layout_puts_an_address_on_the_primary_interface_alone() -> None:
    found = [(i.card, i.device, i.type.value) for i in network_interfaces("c6in.32xlarge")]
    assert found == [(0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa-only")]


def test_the_older_layout_gives_every_card_an_efa_with_an_address() -> None:
    found = [(i.card, i.device, i.type.value) for i in network_interfaces("c6in.32xlarge", EfaLayout.B)]
    assert found == [(0, 0, "efa"), (1, 1, "efa")]


@pytest.mark.parametrize("layout", list(EfaLayout))
@pytest.mark.parametrize("name", WITH_EFA)
def test_every_card_has_its_efa_once(name: str, layout: EfaLayout) -> None:
    interfaces = network_interfaces(name, layout)
    efa = [i for i in interfaces if i.type is not InterfaceType.INTERFACE]
    assert len(efa) == INSTANCE_TYPES[name].efa_interfaces
    assert len({i.card for i in efa}) == len(efa)
    assert len({(i.card, i.device) for i in interfaces}) == len(interfaces)
    assert (interfaces[0].card, interfaces[0].device) == (0, 0)
    assert interfaces[0].has_address


@pytest.mark.parametrize("name", ["trn1.2xlarge", "c7i.2xlarge"])
def test_a_type_without_efa_has_one_plain_interface(name: str) -> None:
    assert [i.type for i in network_interfaces(name)] == [InterfaceType.INTERFACE]


@pytest.mark.parametrize("name", ["trn3.48xlarge", "p9.48xlarge"])
def test_a_type_with_an_unknown_number_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match=r"choose one of .*trn2\.48xlarge"):
        network_interfaces(name)
