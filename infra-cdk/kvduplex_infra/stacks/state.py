"""The state stack: a serverless Valkey store for what routers remember of conversations."""

from __future__ import annotations

from typing import Any

from aws_cdk import CfnOutput, RemovalPolicy
from aws_cdk import aws_elasticache as elasticache
from aws_cdk import aws_secretsmanager as secrets
from constructs import Construct

from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.names import STATE_USER
from kvduplex_infra.stacks.base import ClusterStack
from kvduplex_infra.stacks.network import NetworkStack

__all__ = ["ACCESS", "StateStack"]

ACCESS = (
    "on ~kvduplex:* &kvduplex:* -@all +@read +@write +@keyspace +@scripting +@connection +@pubsub +time -@dangerous"
)
"""Everything the routers need and nothing an intruder would want: no administration, no keys of others."""
_PASSWORD_LENGTH = 64


class StateStack(ClusterStack):
    """Metadata of conversations, never KV or text; losing it costs one recomputation a conversation.

    Attributes:
        endpoint: Address of the store, ``HOST:PORT``; TLS always.
        password: Secret of the routers' user.
    """

    def __init__(self, scope: Construct, *, cluster: Cluster, network: NetworkStack, **kwargs: Any) -> None:
        super().__init__(scope, "state", cluster=cluster, **kwargs)
        self.password = secrets.Secret(
            self,
            "Password",
            description=f"kvduplex {cluster.name}: routers' password for Valkey",
            generate_secret_string=secrets.SecretStringGenerator(
                exclude_punctuation=True, password_length=_PASSWORD_LENGTH
            ),
            removal_policy=RemovalPolicy.DESTROY,
        )
        cache = elasticache.CfnServerlessCache(
            self,
            "Valkey",
            engine="valkey",
            major_engine_version="8",
            serverless_cache_name=cluster.name,
            description="Conversations shared by routers",
            security_group_ids=[network.groups.state.security_group_id],
            subnet_ids=[subnet.subnet_id for subnet in network.private_subnets],
            user_group_id=self._users().ref,
            cache_usage_limits=_limits(cluster),
        )
        self.endpoint = f"{cache.attr_endpoint_address}:{cache.attr_endpoint_port}"
        CfnOutput(self, "Endpoint", value=self.endpoint)
        CfnOutput(self, "PasswordSecret", value=self.password.secret_arn)

    def _users(self) -> elasticache.CfnUserGroup:
        user = elasticache.CfnUser(
            self,
            "Router",
            engine="valkey",
            user_id=f"{self.cluster.name}-router",
            user_name=STATE_USER,
            access_string=ACCESS,
            passwords=[self.password.secret_value.unsafe_unwrap()],
        )
        return elasticache.CfnUserGroup(
            self, "Users", engine="valkey", user_group_id=f"{self.cluster.name}-users", user_ids=[user.ref]
        )


def _limits(cluster: Cluster) -> elasticache.CfnServerlessCache.CacheUsageLimitsProperty:
    return elasticache.CfnServerlessCache.CacheUsageLimitsProperty(
        data_storage=elasticache.CfnServerlessCache.DataStorageProperty(
            maximum=cluster.state.max_storage_gb, unit="GB"
        ),
        ecpu_per_second=elasticache.CfnServerlessCache.ECPUPerSecondProperty(maximum=cluster.state.max_ecpu_per_second),
    )
