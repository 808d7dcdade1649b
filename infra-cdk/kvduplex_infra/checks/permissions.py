"""Rules over IAM policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvduplex_infra.checks.assembly import Assembly
from kvduplex_infra.checks.finding import Finding, Rule
from kvduplex_infra.explanations import STATEMENTS

__all__ = ["RULES"]

_MANAGED = ("AWS::IAM::Policy", "AWS::IAM::ManagedPolicy", "AWS::IAM::Role")


def statements(assembly: Assembly) -> Iterator[Finding]:
    """A statement on every resource is one that is explained; none allows every action of a service."""
    for kind in _MANAGED:
        for resource in assembly.resources(kind):
            for statement in _statements(resource.properties):
                if "*" in _listed(statement.get("Resource")) and statement.get("Sid") not in STATEMENTS:
                    seen = statement.get("Sid", "without an id")
                    message = f"statement {seen} applies to every resource; name them, or say why in explanations.py"
                    yield Finding("iam.everything", resource.place, message)
                for action in _listed(statement.get("Action")):
                    if isinstance(action, str) and action.endswith("*"):
                        yield Finding("iam.actions", resource.place, f"action {action}; name the actions")


def managed_policies(assembly: Assembly) -> Iterator[Finding]:
    """Roles carry no policy that AWS may widen."""
    for role in assembly.resources("AWS::IAM::Role"):
        for arn in role.properties.get("ManagedPolicyArns", []):
            yield Finding("iam.managed", role.place, f"managed policy {arn}; write out what is needed")


RULES: tuple[Rule, ...] = (statements, managed_policies)


def _statements(properties: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    documents = [properties.get("PolicyDocument", {}), *(p["PolicyDocument"] for p in properties.get("Policies", []))]
    for document in documents:
        yield from document.get("Statement", [])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
