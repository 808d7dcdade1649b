"""Rules over security groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvduplex_infra.checks.assembly import Assembly, Place
from kvduplex_infra.checks.finding import Finding, Rule

__all__ = ["RULES"]

_GROUP = "AWS::EC2::SecurityGroup"
_EVERYONE = {"0.0.0.0/0", "::/0"}
_SSH = 22


def efa_groups(assembly: Assembly) -> Iterator[Finding]:
    """A group on an EFA interface lets itself in and out, everything, and nobody else in."""
    for place in sorted(_on_all_efa(assembly), key=str):
        for direction in ("ingress", "egress"):
            rules = list(_rules(assembly, place, direction))
            others = [rule for rule in rules if not _is_self(assembly, place, rule)]
            if not any(_is_self(assembly, place, rule) and str(rule.get("IpProtocol")) == "-1" for rule in rules):
                yield Finding("efa.self", place, f"no {direction} of all traffic with itself; EFA needs it")
            if others:
                yield Finding(
                    "efa.others", place, f"{len(others)} {direction} rules with others; EFA needs only itself"
                )


def open_doors(assembly: Assembly) -> Iterator[Finding]:
    """Nothing is open to everyone, and nothing at all to SSH."""
    for group in assembly.resources(_GROUP):
        for rule in _rules(assembly, group.place, "ingress"):
            if {rule.get("CidrIp"), rule.get("CidrIpv6")} & _EVERYONE:
                yield Finding("ingress.everyone", group.place, f"ingress from everyone on port {rule.get('FromPort')}")
            low, high = rule.get("FromPort"), rule.get("ToPort")
            if isinstance(low, int) and isinstance(high, int) and low <= _SSH <= high:
                yield Finding("ingress.ssh", group.place, "port 22 is open; machines are reached by Session Manager")


RULES: tuple[Rule, ...] = (efa_groups, open_doors)


def _on_all_efa(assembly: Assembly) -> set[Place]:
    """Groups that stand on every EFA interface of some template: the ones EFA traffic passes."""
    found: set[Place] = set()
    for template in assembly.resources("AWS::EC2::LaunchTemplate"):
        listed = template.properties["LaunchTemplateData"].get("NetworkInterfaces", [])
        for interface in listed:
            if interface.get("InterfaceType") == "efa-only":
                targets = (assembly.target(template.place.stack, group) for group in interface.get("Groups", []))
                found |= {target for target in targets if target is not None}
    return found


def _rules(assembly: Assembly, place: Place, direction: str) -> Iterator[Mapping[str, Any]]:
    group = assembly.resource(place)
    if group is not None:
        yield from group.properties.get(f"SecurityGroup{direction.capitalize()}", [])
    for rule in assembly.resources(f"AWS::EC2::SecurityGroup{direction.capitalize()}"):
        if assembly.target(rule.place.stack, rule.properties.get("GroupId")) == place:
            yield rule.properties


def _is_self(assembly: Assembly, place: Place, rule: Mapping[str, Any]) -> bool:
    other = rule.get("SourceSecurityGroupId") or rule.get("DestinationSecurityGroupId")
    return assembly.target(place.stack, other) == place
