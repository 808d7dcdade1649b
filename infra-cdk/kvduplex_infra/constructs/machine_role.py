"""What one role's machines may do on AWS."""

from __future__ import annotations

from aws_cdk import Stack
from aws_cdk import aws_iam as iam
from constructs import Construct

from kvduplex.node.discovery import CLUSTER_TAG, STATE_TAG
from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.names import METRIC_NAMESPACE, Names
from kvduplex_infra.policies import on_everything, statement
from kvduplex_infra.session_manager import SESSION_MANAGER

__all__ = ["MachineRole"]


class MachineRole(Construct):
    """The IAM role of a role's machines, with an instance profile.

    Attributes:
        role: The role; stacks that own a resource grant on it.
        profile: Instance profile for launch templates.
    """

    def __init__(self, scope: Construct, construct_id: str, *, cluster: Cluster, names: Names, role: str) -> None:
        super().__init__(scope, construct_id)
        self.role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            description=f"Machines of {cluster.name}: {role}",
        )
        self.profile = iam.CfnInstanceProfile(self, "Profile", roles=[self.role.role_name])
        self._allow_operation(names, role)
        if role == "router":
            self.role.add_to_policy(on_everything("FindEngines", ["ec2:DescribeInstances"]))
        else:
            self._allow_weights(cluster)
            self._allow_leaving(cluster)

    def _allow_operation(self, names: Names, role: str) -> None:
        stack = Stack.of(self)
        stack_name = names.stack("router" if role == "router" else "engines")
        group = f"arn:PARTITION:autoscaling:REGION:ACCOUNT:autoScalingGroup:*:autoScalingGroupName/{names.group(role)}"
        log_group = f"arn:PARTITION:logs:REGION:ACCOUNT:log-group:{names.log_group(role)}"
        agent = f"arn:PARTITION:ssm:REGION:ACCOUNT:parameter{names.agent_parameter(role)}"
        self.role.add_to_policy(on_everything("SessionManager", SESSION_MANAGER))
        self.role.add_to_policy(
            on_everything(
                "PublishMetrics",
                ["cloudwatch:PutMetricData"],
                {"StringEquals": {"cloudwatch:namespace": METRIC_NAMESPACE}},
            )
        )
        for sid, actions, arn in (
            ("WriteLogs", ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"], f"{log_group}:*"),
            ("ReadAgentConfiguration", ["ssm:GetParameter"], agent),
            (
                "ReportLifecycle",
                [
                    "autoscaling:CompleteLifecycleAction",
                    "autoscaling:RecordLifecycleActionHeartbeat",
                    "autoscaling:SetInstanceHealth",
                ],
                group,
            ),
            (
                "SignalUpdate",
                ["cloudformation:SignalResource"],
                f"arn:PARTITION:cloudformation:REGION:ACCOUNT:stack/{stack_name}/*",
            ),
        ):
            self.role.add_to_policy(statement(stack, sid, actions, [arn]))

    def _allow_weights(self, cluster: Cluster) -> None:
        sources = {"ReadWeights": cluster.served.source, "ReadCompileCache": cluster.compile_cache}
        for sid, url in sources.items():
            if url is None:
                continue
            bucket, _, prefix = url.removeprefix("s3://").partition("/")
            prefix = prefix.rstrip("/")
            objects = f"arn:PARTITION:s3:::{bucket}/{prefix}/*" if prefix else f"arn:PARTITION:s3:::{bucket}/*"
            self.role.add_to_policy(statement(Stack.of(self), sid, ["s3:GetObject"], [objects]))
            listing = iam.PolicyStatement(
                sid=f"{sid}List",
                actions=["s3:ListBucket"],
                resources=[f"arn:{Stack.of(self).partition}:s3:::{bucket}"],
                conditions={"StringLike": {"s3:prefix": [f"{prefix}/*" if prefix else "*"]}},
            )
            self.role.add_to_policy(listing)

    def _allow_leaving(self, cluster: Cluster) -> None:
        """Let an engine's machine take itself out of the routers' sight, by a tag, and tag nothing else."""
        machine = "arn:PARTITION:ec2:REGION:ACCOUNT:instance/*"
        leaving = statement(Stack.of(self), "MarkDraining", ["ec2:CreateTags"], [machine])
        leaving.add_conditions(
            {
                "StringEquals": {f"aws:ResourceTag/{CLUSTER_TAG}": cluster.name},
                "ForAllValues:StringEquals": {"aws:TagKeys": [STATE_TAG]},
            }
        )
        self.role.add_to_policy(leaving)
