"""Ways to AWS services that do not pass the internet."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import aws_ec2 as ec2

__all__ = ["CONTAINER_SERVICES", "INTERFACE_SERVICES", "add_endpoints"]

INTERFACE_SERVICES = (
    "ssm",
    "ssmmessages",
    "ec2messages",
    "secretsmanager",
    "logs",
    "monitoring",
    "ec2",
    "autoscaling",
    "cloudformation",
)
"""What machines call: Session Manager, keys, logs, metrics, discovery, lifecycle, rolling updates."""


CONTAINER_SERVICES = ("ecr.api", "ecr.dkr")
"""What containers are pulled through, besides the gateway to S3."""


def add_endpoints(vpc: ec2.Vpc, *, services: Sequence[str], group: ec2.ISecurityGroup) -> None:
    """Give `vpc` an endpoint for each service, and the gateway to S3, which costs nothing."""
    vpc.add_gateway_endpoint("S3", service=ec2.GatewayVpcEndpointAwsService.S3)
    for service in services:
        vpc.add_interface_endpoint(
            "".join(part.capitalize() for part in service.split(".")),
            service=ec2.InterfaceVpcEndpointAwsService(service),
            security_groups=[group],
            private_dns_enabled=True,
            open=False,
        )
