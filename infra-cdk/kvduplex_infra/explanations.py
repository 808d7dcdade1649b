"""Why some statements apply to every resource, and why some findings of cdk-nag are kept."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["FINDINGS", "STATEMENTS"]

STATEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "SessionManager": "The agent's calls name no resource that IAM could match (service authorization reference: "
        "ssmmessages, ec2messages, ssm:UpdateInstanceInformation); they open no way to other machines.",
        "PublishMetrics": "cloudwatch:PutMetricData has no resource; a condition holds it to the namespace kvduplex.",
        "RegistryLogin": "ecr:GetAuthorizationToken names no repository; PullImage names the one that is read.",
        "FindEngines": "ec2:DescribeInstances has no resource-level permission; it reads and changes nothing.",
    }
)
"""By statement id: why it applies to every resource. Any other statement on ``*`` is refused."""

FINDINGS: Mapping[str, str] = MappingProxyType(
    {
        "keys": "Rotating a key without its holders breaks them: client keys are rotated by adding a line and removing "
        "the old one later, the engine key by replacing machines (docs/deploy-aws.md).",
        "everything": "Only the statements that explanations.py explains apply to every resource.",
        "log_streams": "The log group is the role's own; its streams are named by instance id, unknown before launch.",
        "group": "The group is named; the wildcard is its unique id, which Auto Scaling makes up.",
        "stack": "The stack is named; the wildcard is its unique id, which CloudFormation makes up.",
        "machines": "Instance ids are unknown before launch; conditions hold it to this cluster's machines and to the "
        "one tag that takes an engine out of the routers' sight.",
        "objects": "Objects below the prefix that the cluster file names, read only.",
        "log_bucket": "It holds access logs itself; logging its own accesses would not end.",
        "builder": "Image Builder names its buckets, log groups and component versions itself; the flavour's own "
        "components, and reading alone but for logs.",
        "node_file": "The environment holds the node file, which names where secrets lie and holds none of them.",
        "zones": "EFA, capacity and reservations are bound to zones, so the cluster file names them.",
    }
)
"""By kind of finding: why it is kept."""
