"""The front door: a load balancer that lets streams run and drains routers before they go."""

from __future__ import annotations

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_certificatemanager as acm
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_elasticloadbalancingv2 as elbv2
from aws_cdk import aws_s3 as s3
from constructs import Construct

from kvduplex_infra.cluster.access import Access
from kvduplex_infra.names import ROUTER_PORT

__all__ = ["Balancer"]

IDLE_TIMEOUT_S = 4000
"""The longest an Application Load Balancer allows. A stream sends nothing while a long prompt is computed; the
router's own limits end turns that hang."""
_LOG_DAYS = 90
_PRIVATE_PATHS = ("/metrics", "/admin*", "/dashboard*", "/openapi.json")
_DEREGISTRATION_MAX_S = 3600


class Balancer(Construct):
    """An Application Load Balancer before the routers.

    Attributes:
        balancer: The load balancer.
        targets: Target group of the routers.
        listener: What clients reach; targets are in use once it is there.
        access_logs: Bucket of its access logs, which hold addresses and paths, never prompts.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        vpc: ec2.IVpc,
        private_subnets: list[ec2.ISubnet],
        group: ec2.ISecurityGroup,
        access: Access,
        drain_timeout_s: int,
        target_type: elbv2.TargetType,
    ) -> None:
        super().__init__(scope, construct_id)
        is_public = access.mode == "public"
        self.access_logs = s3.Bucket(
            self,
            "AccessLogs",
            encryption=s3.BucketEncryption.S3_MANAGED,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            enforce_ssl=True,
            versioned=False,
            lifecycle_rules=[s3.LifecycleRule(expiration=Duration.days(_LOG_DAYS))],
            removal_policy=RemovalPolicy.RETAIN,
        )
        self.balancer = elbv2.ApplicationLoadBalancer(
            self,
            "Balancer",
            vpc=vpc,
            internet_facing=is_public,
            vpc_subnets=ec2.SubnetSelection(subnets=list(vpc.public_subnets) if is_public else private_subnets),
            security_group=group,
            idle_timeout=Duration.seconds(IDLE_TIMEOUT_S),
            drop_invalid_header_fields=True,
            desync_mitigation_mode=elbv2.DesyncMitigationMode.STRICTEST,
            deletion_protection=False,
        )
        self.balancer.log_access_logs(self.access_logs)
        self.targets = _targets(self, vpc, drain_timeout_s, target_type)
        self.listener = self._listener(access)
        self._keep_private(self.listener)

    def _keep_private(self, listener: elbv2.ApplicationListener) -> None:
        # Metrics name engines, and operators' paths are for operators: both are reached from the machines themselves.
        listener.add_action(
            "Private",
            priority=1,
            conditions=[elbv2.ListenerCondition.path_patterns(list(_PRIVATE_PATHS))],
            action=elbv2.ListenerAction.fixed_response(
                404, content_type="application/json", message_body='{"error": {"message": "not found"}}'
            ),
        )

    def _listener(self, access: Access) -> elbv2.ApplicationListener:
        if access.certificate_arn is None:
            return self.balancer.add_listener(
                "Http",
                port=80,
                open=False,
                protocol=elbv2.ApplicationProtocol.HTTP,
                default_target_groups=[self.targets],
            )
        return self.balancer.add_listener(
            "Https",
            port=443,
            open=False,
            protocol=elbv2.ApplicationProtocol.HTTPS,
            ssl_policy=elbv2.SslPolicy.TLS13_RES,
            certificates=[acm.Certificate.from_certificate_arn(self, "Certificate", access.certificate_arn)],
            default_target_groups=[self.targets],
        )


def _targets(
    scope: Construct, vpc: ec2.IVpc, drain_timeout_s: int, target_type: elbv2.TargetType
) -> elbv2.ApplicationTargetGroup:
    return elbv2.ApplicationTargetGroup(
        scope,
        "Routers",
        vpc=vpc,
        port=ROUTER_PORT,
        protocol=elbv2.ApplicationProtocol.HTTP,
        target_type=target_type,
        deregistration_delay=Duration.seconds(min(drain_timeout_s, _DEREGISTRATION_MAX_S)),
        load_balancing_algorithm_type=elbv2.TargetGroupLoadBalancingAlgorithmType.LEAST_OUTSTANDING_REQUESTS,
        # Liveness, not readiness: routers without engines answer 503 with a reason, and replacing them helps nobody.
        health_check=elbv2.HealthCheck(
            path="/health",
            healthy_http_codes="200",
            interval=Duration.seconds(10),
            timeout=Duration.seconds(5),
            healthy_threshold_count=2,
            unhealthy_threshold_count=3,
        ),
    )
