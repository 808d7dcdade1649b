"""IAM statements of the machines: each scoped to the cluster's own resources, or explained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aws_cdk import Stack
from aws_cdk import aws_iam as iam

from kvduplex_infra.errors import InfraError
from kvduplex_infra.explanations import STATEMENTS

__all__ = ["on_everything", "statement"]


def statement(stack: Stack, sid: str, actions: Sequence[str], arns: Sequence[str]) -> iam.PolicyStatement:
    """Allow `actions` on `arns`; ``PARTITION``, ``REGION`` and ``ACCOUNT`` in them are replaced."""
    values = {"PARTITION": stack.partition, "REGION": stack.region, "ACCOUNT": stack.account}
    resources = []
    for arn in arns:
        text = arn
        for word, value in values.items():
            text = text.replace(word, value)
        resources.append(text)
    return iam.PolicyStatement(sid=sid, actions=list(actions), resources=resources)


def on_everything(
    sid: str, actions: Sequence[str], conditions: Mapping[str, Mapping[str, str]] | None = None
) -> iam.PolicyStatement:
    """Allow `actions` on every resource.

    Raises:
        InfraError: Nothing explains a statement of that id.
    """
    if sid not in STATEMENTS:
        raise InfraError(f"statement {sid} applies to every resource; say why in explanations.py, or name resources")
    return iam.PolicyStatement(sid=sid, actions=list(actions), resources=["*"], conditions=dict(conditions or {}))
