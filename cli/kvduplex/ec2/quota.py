"""Service quotas of on-demand instances (EC2 user guide, "On-Demand Instance quotas")."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvduplex.node.aws import explained
from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.interface import Finding

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_service_quotas import ServiceQuotasClient

__all__ = ["Quota", "family_of", "quota_findings", "quota_of"]


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit on the vCPUs of running on-demand instances."""

    code: str
    name: str
    families: frozenset[str]
    """Letters that types counted against it begin with."""


_STANDARD = Quota("L-1216C47A", "Running On-Demand Standard instances", frozenset("acdhimrtz"))
_QUOTAS = (
    Quota("L-2C3B7624", "Running On-Demand Trn instances", frozenset({"trn"})),
    Quota("L-1945791B", "Running On-Demand Inf instances", frozenset({"inf"})),
    Quota("L-417A185B", "Running On-Demand P instances", frozenset({"p"})),
    Quota("L-DB2E81BA", "Running On-Demand G and VT instances", frozenset({"g", "vt"})),
)
_BY_FAMILY: Mapping[str, Quota] = MappingProxyType(
    {family: quota for quota in (_STANDARD, *_QUOTAS) for family in quota.families}
)


def family_of(instance_type: str) -> str:
    """Letters that a type begins with, e.g. ``trn`` of ``trn2.48xlarge``."""
    match = re.match(r"[a-z]+", instance_type)
    return match[0] if match else ""


def quota_of(instance_type: str) -> Quota | None:
    """The quota of a type, or None when the table does not know its family."""
    return _BY_FAMILY.get(family_of(instance_type))


def quota_findings(needs: Mapping[str, int], *, ec2: EC2Client, quotas: ServiceQuotasClient) -> Iterator[Finding]:
    """Whether the account may run `needs`, counts by type, beside what it runs already.

    Raises:
        AwsError: EC2 or Service Quotas cannot be asked.
    """
    vcpus = _vcpus(ec2, sorted(needs))
    for quota in sorted({q for name in needs if (q := quota_of(name)) is not None}, key=lambda q: q.code):
        wanted = sum(count * vcpus.get(name, 0) for name, count in needs.items() if quota_of(name) == quota)
        with explained(f"looking at quota {quota.name}", remedy="Allow servicequotas:GetServiceQuota."):
            limit = quotas.get_service_quota(ServiceCode="ec2", QuotaCode=quota.code)["Quota"]["Value"]
        used = _running_vcpus(ec2, quota.families)
        seen, expected = f"{limit:g} vCPUs, {used} in use ({quota.name})", f"{wanted} more"
        if used + wanted > limit:
            yield fail(
                "launch.quota",
                seen,
                expected,
                why="AWS refuses instances beyond the quota",
                fix="aws service-quotas request-service-quota-increase --service-code ec2 "
                f"--quota-code {quota.code} --desired-value {used + wanted}",
            )
        else:
            yield ok("launch.quota", seen, expected)
    for name in sorted(name for name in needs if quota_of(name) is None):
        yield warn(
            "launch.quota",
            f"{name}: family {family_of(name)} is in no known quota",
            "enough quota",
            why="AWS may refuse the instances",
            fix="look at Service Quotas, Amazon EC2, for this family",
        )


def _vcpus(ec2: EC2Client, names: list[str]) -> dict[str, int]:
    if not names:
        return {}
    with explained("looking at instance types", remedy="Check their names and the region."):
        found = ec2.describe_instance_types(InstanceTypes=names)["InstanceTypes"]  # type: ignore[arg-type]
    return {str(row["InstanceType"]): row["VCpuInfo"]["DefaultVCpus"] for row in found}


def _running_vcpus(ec2: EC2Client, families: frozenset[str]) -> int:
    names: dict[str, int] = {}
    with explained("counting running instances", remedy="Allow ec2:DescribeInstances."):
        pages = ec2.get_paginator("describe_instances").paginate(
            Filters=[{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        )
        for page in pages:
            for instance in (i for r in page["Reservations"] for i in r.get("Instances", [])):
                if family_of(instance["InstanceType"]) in families and "CapacityReservationId" not in instance:
                    names[instance["InstanceType"]] = names.get(instance["InstanceType"], 0) + 1
    vcpus = _vcpus(ec2, sorted(names))
    return sum(count * vcpus.get(name, 0) for name, count in names.items())
