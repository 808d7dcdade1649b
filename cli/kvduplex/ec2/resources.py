"""The security group and placement group that a launched cluster has of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvduplex.ec2.plan import resource_name
from kvduplex.node.aws import explained
from kvduplex.node.discovery import CLUSTER_TAG

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

__all__ = ["delete_own", "ensure_placement_group", "ensure_security_group", "own_placement_group", "own_security_group"]

_RETRY_S = 5.0
_HTTPS = {
    "IpProtocol": "tcp",
    "FromPort": 443,
    "ToPort": 443,
    "IpRanges": [{"CidrIp": "0.0.0.0/0", "Description": "AWS services and model hub"}],
}


def own_security_group(cluster: str, vpc: str | None, *, ec2: EC2Client) -> str | None:
    """Id of the cluster's own security group, or None.

    Raises:
        AwsError: EC2 cannot be asked.
    """
    filters: list[Any] = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]}]
    filters += [{"Name": "group-name", "Values": [resource_name(cluster)]}]
    filters += [{"Name": "vpc-id", "Values": [vpc]}] if vpc else []
    with explained("looking up the cluster's security group", remedy="Allow ec2:DescribeSecurityGroups."):
        found = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
    return found[0]["GroupId"] if found else None


def ensure_security_group(cluster: str, vpc: str, *, ec2: EC2Client) -> str:
    """Make the cluster's group unless it is there: all traffic between members, HTTPS out, nothing else in.

    Raises:
        AwsError: EC2 refuses.
    """
    if (known := own_security_group(cluster, vpc, ec2=ec2)) is not None:
        return known
    name = resource_name(cluster)
    with explained(
        f"making security group {name}", remedy="Allow ec2:CreateSecurityGroup and its rules, or give --security-group."
    ):
        group = ec2.create_security_group(
            GroupName=name,
            Description=f"Members of kvduplex cluster {cluster}",
            VpcId=vpc,
            TagSpecifications=[_tags("security-group", cluster)],
        )["GroupId"]
        members: Any = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group, "Description": "EFA and engines"}]}
        everything: Any = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[members])
        # EFA counts traffic to the group itself only when a rule names the group, so "everywhere" would not do.
        ec2.revoke_security_group_egress(GroupId=group, IpPermissions=[everything])
        ec2.authorize_security_group_egress(GroupId=group, IpPermissions=[members, _HTTPS])  # type: ignore[list-item]
    return group


def own_placement_group(cluster: str, *, ec2: EC2Client) -> str | None:
    """Name of the cluster's placement group, or None.

    Raises:
        AwsError: EC2 cannot be asked.
    """
    filters: list[Any] = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]}]
    with explained("looking up the cluster's placement group", remedy="Allow ec2:DescribePlacementGroups."):
        found = ec2.describe_placement_groups(Filters=filters)["PlacementGroups"]
    return found[0]["GroupName"] if found else None


def ensure_placement_group(cluster: str, *, ec2: EC2Client) -> str:
    """Make the cluster's placement group unless it is there, and return its name.

    Raises:
        AwsError: EC2 refuses.
    """
    if (known := own_placement_group(cluster, ec2=ec2)) is not None:
        return known
    name = resource_name(cluster)
    with explained(f"making placement group {name}", remedy="Allow ec2:CreatePlacementGroup."):
        ec2.create_placement_group(
            GroupName=name, Strategy="cluster", TagSpecifications=[_tags("placement-group", cluster)]
        )
    return name


def delete_own(
    cluster: str,
    *,
    ec2: EC2Client,
    timeout_s: float = 120.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Delete the cluster's groups; those that are in use by vanishing instances are tried again until the deadline.

    Raises:
        AwsError: EC2 refuses for another reason, or still at the deadline.
    """
    deadline = clock() + timeout_s
    if (placement := own_placement_group(cluster, ec2=ec2)) is not None:
        _until(deadline, clock, sleep, lambda: ec2.delete_placement_group(GroupName=placement))
    if (group := own_security_group(cluster, None, ec2=ec2)) is not None:
        _until(deadline, clock, sleep, lambda: ec2.delete_security_group(GroupId=group))


def _until(
    deadline: float, clock: Callable[[], float], sleep: Callable[[float], None], call: Callable[[], Any]
) -> None:
    from botocore.exceptions import ClientError  # noqa: PLC0415 - only where boto3 is

    with explained("deleting the cluster's groups", remedy="Run `kvduplex launch terminate` again in a minute."):
        while True:
            try:
                call()
            except ClientError as error:
                in_use = error.response["Error"]["Code"] in {"DependencyViolation", "InvalidPlacementGroup.InUse"}
                if not in_use or clock() >= deadline:
                    raise
                sleep(_RETRY_S)
            else:
                return


def _tags(kind: str, cluster: str) -> Any:
    return {
        "ResourceType": kind,
        "Tags": [{"Key": CLUSTER_TAG, "Value": cluster}, {"Key": "Name", "Value": resource_name(cluster)}],
    }
