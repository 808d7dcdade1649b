"""What of a cluster is still there, e.g. after `cdk destroy`: kept on purpose, or stuck."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvduplex.node.aws import explained
from kvduplex.node.discovery import CLUSTER_TAG

if TYPE_CHECKING:
    from types_boto3_cloudformation import CloudFormationClient
    from types_boto3_resourcegroupstaggingapi import ResourceGroupsTaggingAPIClient

__all__ = ["Leftover", "leftovers"]

_GONE = {"DELETE_COMPLETE"}
_ADVICE = {
    "s3": "access logs, kept on purpose; empty and delete the bucket once you have read them",
    "kms": "a key in its waiting time before deletion; costs nothing by then",
    "secretsmanager": "a secret in its recovery time; it goes by itself",
    "elasticloadbalancing": "costs money: delete it, or the stack that made it",
    "ec2": "may cost money: delete it, or the stack that made it",
}


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing that is still there, and what to do about it."""

    name: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.advice}"


def leftovers(
    cluster: str, *, cloudformation: CloudFormationClient, tagging: ResourceGroupsTaggingAPIClient
) -> list[Leftover]:
    """Stacks and tagged resources of the cluster called `cluster`, sorted.

    Terminated instances stay visible for about an hour; the tagging service forgets them later than EC2.

    Raises:
        AwsError: A service cannot be asked.
    """
    found = [*_stacks(cluster, cloudformation), *_resources(cluster, tagging)]
    return sorted(found, key=str)


def _stacks(cluster: str, cloudformation: CloudFormationClient) -> Iterator[Leftover]:
    with explained("listing stacks", remedy="Allow cloudformation:DescribeStacks."):
        pages = list(cloudformation.get_paginator("describe_stacks").paginate())
    for stack in (stack for page in pages for stack in page["Stacks"]):
        tags = {tag.get("Key"): tag.get("Value") for tag in stack.get("Tags", [])}
        if tags.get(CLUSTER_TAG) == cluster and stack["StackStatus"] not in _GONE:
            advice = f"is {stack['StackStatus']}; `cdk destroy --all -c cluster=FILE` removes it"
            yield Leftover(f"stack {stack['StackName']}", advice)


def _resources(cluster: str, tagging: ResourceGroupsTaggingAPIClient) -> Iterator[Leftover]:
    with explained("listing tagged resources", remedy="Allow tag:GetResources."):
        pages = list(
            tagging.get_paginator("get_resources").paginate(TagFilters=[{"Key": CLUSTER_TAG, "Values": [cluster]}])
        )
    for mapping in (mapping for page in pages for mapping in page["ResourceTagMappingList"]):
        arn = mapping.get("ResourceARN", "")
        service = arn.split(":")[2] if arn.count(":") > 1 else ""
        if service != "cloudformation":
            yield Leftover(arn, _ADVICE.get(service, "delete it by hand if nothing uses it"))
