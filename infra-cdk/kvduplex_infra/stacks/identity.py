"""The identity stack: keys, the machines' roles, and the topic through which operators are told."""

from __future__ import annotations

from typing import Any

from aws_cdk import CfnOutput, RemovalPolicy
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_secretsmanager as secrets
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.constructs.machine_role import MachineRole
from kvduplex_infra.constructs.task_role import task_role
from kvduplex_infra.stacks.base import ClusterStack

__all__ = ["IdentityStack"]

KEY_LENGTH = 48


class IdentityStack(ClusterStack):
    """Who machines are, what they know, and who is told.

    Attributes:
        client_keys: Secret with the keys that clients present, one a line.
        engine_key: Secret with the key that routers present to engines.
        roles: Role of the machines, by ``prefill``, ``decode`` and ``router``; the last only where routers have some.
        router_role: Role of the routers, on machines or in containers.
        operators: Topic of alarms and of scaling events.
    """

    def __init__(self, scope: Construct, *, cluster: Cluster, **kwargs: Any) -> None:
        super().__init__(scope, "identity", cluster=cluster, **kwargs)
        self.client_keys = self._secret("ClientKeys", cluster.keys.clients, "keys of the cluster's clients")
        self.engine_key = self._secret("EngineKey", cluster.keys.engines, "key between routers and engines")
        on_machines = (*cluster.fleets, "router") if cluster.router.platform == "ec2" else tuple(cluster.fleets)
        self.roles = {role: self._role(role) for role in on_machines}
        self.router_role: iam.IRole = (
            self.roles["router"].role if "router" in self.roles else task_role(self, "Routers", names=self.names)
        )
        for role in cluster.fleets:
            self.engine_key.grant_read(self.roles[role].role)
        self.engine_key.grant_read(self.router_role)
        self.client_keys.grant_read(self.router_role)
        self.operators = self._topic()
        CfnOutput(self, "ClientKeysSecret", value=self.client_keys.secret_arn)

    def _secret(self, construct_id: str, wanted: str, purpose: str) -> secrets.ISecret:
        if wanted != "generate":
            return secrets.Secret.from_secret_complete_arn(self, construct_id, wanted)
        return secrets.Secret(
            self,
            construct_id,
            description=f"kvduplex {self.cluster.name}: {purpose}",
            generate_secret_string=secrets.SecretStringGenerator(
                exclude_punctuation=True, password_length=KEY_LENGTH, include_space=False
            ),
            removal_policy=RemovalPolicy.DESTROY,
        )

    def _role(self, role: str) -> MachineRole:
        return MachineRole(self, f"{role.capitalize()}Machines", cluster=self.cluster, names=self.names, role=role)

    def _topic(self) -> sns.Topic:
        topic = sns.Topic(self, "Operators", master_key=self._topic_key(), enforce_ssl=True)
        # A topic with a policy of its own no longer takes messages from the account's alarms by itself.
        topic.add_to_resource_policy(
            iam.PolicyStatement(
                sid="AlarmsOfThisAccount",
                principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
                actions=["sns:Publish"],
                resources=[topic.topic_arn],
                conditions={"StringEquals": {"aws:SourceAccount": self.account}},
            )
        )
        for email in self.cluster.alarms.emails:
            topic.add_subscription(subscriptions.EmailSubscription(email))
        return topic

    def _topic_key(self) -> kms.Key:
        """A key of our own: CloudWatch, EventBridge and Auto Scaling cannot publish with the AWS-managed one."""
        key = kms.Key(
            self,
            "TopicKey",
            description=f"kvduplex {self.cluster.name}: alarms",
            enable_key_rotation=True,
            removal_policy=RemovalPolicy.DESTROY,
        )
        for service in ("cloudwatch.amazonaws.com", "events.amazonaws.com"):
            key.grant_encrypt_decrypt(iam.ServicePrincipal(service))
        # By condition and not as principal: KMS refuses a policy that names a role which is not there yet, and the
        # account's first group makes this one.
        scaling = "role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
        key.add_to_resource_policy(
            iam.PolicyStatement(
                sid="ScalingEvents",
                principals=[iam.AnyPrincipal()],
                actions=["kms:Decrypt", "kms:GenerateDataKey*"],
                resources=["*"],
                conditions={
                    "StringEquals": {"kms:CallerAccount": self.account},
                    "ArnEquals": {"aws:PrincipalArn": f"arn:{self.partition}:iam::{self.account}:{scaling}"},
                },
            )
        )
        return key
