"""All rules over one assembly."""

from __future__ import annotations

from collections.abc import Sequence

from kvduplex_infra.checks import groups, machines, permissions
from kvduplex_infra.checks.assembly import Assembly
from kvduplex_infra.checks.finding import Finding, Rule

__all__ = ["ALL_RULES", "inspect"]

ALL_RULES: tuple[Rule, ...] = (*machines.RULES, *groups.RULES, *permissions.RULES)


def inspect(assembly: Assembly, rules: Sequence[Rule] = ALL_RULES) -> list[Finding]:
    """Findings of every rule; empty when the templates are in order."""
    return [finding for rule in rules for finding in rule(assembly)]
