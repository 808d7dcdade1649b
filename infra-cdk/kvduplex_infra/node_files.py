"""Each role's ``/etc/kvduplex/node.yaml``, and the user data that puts it on a machine.

The file is built from the schema that the machine itself uses, so that a wrong key stops the synthesis. What only
CloudFormation knows (a secret's ARN, the store's address) is a placeholder here that the template replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvduplex.node.config import (
    CompileCache,
    Discovery,
    Drain,
    EngineSettings,
    Keys,
    KeySource,
    Launch,
    Logging,
    Model,
    NodeConfig,
    NodeRole,
    RouterSettings,
    State,
)
from kvduplex.node.discovery import CLUSTER_TAG
from kvduplex.node.document import NodeConfigError, dump_node
from kvduplex.node.engine import engine_plan_of
from kvduplex.node.user_data import render_user_data
from kvduplex_infra.cluster.model import Cluster, Fleet
from kvduplex_infra.errors import ClusterFileError
from kvduplex_infra.names import ROUTER_PORT, STATE_USER, Names
from kvduplex_transfer.interface import EnginePlan, Role

__all__ = [
    "CLIENT_KEYS",
    "ENGINE_KEY",
    "STATE_ENDPOINT",
    "STATE_PASSWORD",
    "container_node",
    "engine_node",
    "engine_plan",
    "router_node",
    "user_data",
]

CLIENT_KEYS = "arn:aws:secretsmanager:us-east-1:000000000000:secret:client-keys"
_SOME_ADDRESS = "192.0.2.1"
ENGINE_KEY = "arn:aws:secretsmanager:us-east-1:000000000000:secret:engine-key"
STATE_PASSWORD = "arn:aws:secretsmanager:us-east-1:000000000000:secret:state-password"  # noqa: S105 - a placeholder
STATE_ENDPOINT = "store.invalid:6379"


def engine_node(cluster: Cluster, role: str, fleet: Fleet, names: Names) -> NodeConfig:
    """Configuration of one engine machine of `role` (``prefill`` or ``decode``)."""
    return NodeConfig(
        cluster=cluster.name,
        role=NodeRole(role),
        backend=cluster.backend,
        recipe=cluster.recipe,
        model=_model(cluster),
        region=cluster.region,
        compile_cache=CompileCache(source=cluster.compile_cache),
        engine=EngineSettings(
            connector=None if cluster.replicas else cluster.connector,
            start_timeout_s=fleet.start_timeout_s,
            options=fleet.options,
        ),
        keys=Keys(engines=KeySource(secret=ENGINE_KEY)),
        leases=cluster.leases,
        **_everyone(cluster, role, names),
    )


def engine_plan(node: NodeConfig, role: str) -> EnginePlan:
    """What a machine with this file will start, but for its address.

    Raises:
        ClusterFileError: It would refuse to: an option does not fit the recipe or the backend.
    """
    # A plan counts the cores of the machine it is made on, which is not the one that will run it.
    options = {key: value for key, value in node.engine.options.items() if key != "cores_per_engine"}
    elsewhere = node.model_copy(update={"engine": node.engine.model_copy(update={"options": options})})
    try:
        return engine_plan_of(elsewhere, Role(role), address=_SOME_ADDRESS, interpreter="python")
    except NodeConfigError as error:
        raise ClusterFileError(f"{role}.options: {error}") from error


def router_node(cluster: Cluster, names: Names) -> NodeConfig:
    """Configuration of one router machine."""
    return NodeConfig(
        cluster=cluster.name,
        role=NodeRole.ROUTER,
        region=cluster.region,
        router=RouterSettings(
            bind_host="0.0.0.0",
            port=ROUTER_PORT,
            on_no_prefill=cluster.router.on_no_prefill,
            options=cluster.router.options,
        ),
        discovery=Discovery(ec2_tags={CLUSTER_TAG: cluster.name}),
        keys=Keys(clients=KeySource(secret=CLIENT_KEYS), engines=KeySource(secret=ENGINE_KEY)),
        state=_state() if cluster.shares_state else State(),
        **(_everyone(cluster, "router", names) if cluster.router.platform == "ec2" else _in_container(cluster)),
    )


def user_data(node: NodeConfig, replacements: Mapping[str, str]) -> str:
    """The node's user data, with placeholders replaced by what CloudFormation will know."""
    return _filled(render_user_data(node), replacements)


def container_node(node: NodeConfig, replacements: Mapping[str, str]) -> str:
    """The node's file as containers get it, with placeholders replaced likewise."""
    return _filled(dump_node(node), replacements)


def _filled(text: str, replacements: Mapping[str, str]) -> str:
    for placeholder, value in replacements.items():
        text = text.replace(placeholder, value)
    return text


def _model(cluster: Cluster) -> Model:
    served = cluster.served
    return Model(id=served.id, revision=served.revision, source=served.source)


def _state() -> State:
    # With TLS: the store speaks nothing else.
    return State(url=f"valkeys://{STATE_USER}@{STATE_ENDPOINT}", password=KeySource(secret=STATE_PASSWORD))


def _in_container(cluster: Cluster) -> dict[str, Any]:
    # Containers are read by their standard output, and their service takes the place of hooks and signals.
    return {"logging": Logging(relay=True), "drain": Drain(timeout_s=cluster.drain.timeout_s)}


def _everyone(cluster: Cluster, role: str, names: Names) -> dict[str, Any]:
    return {
        "logging": Logging(log_group=names.log_group(role), agent_parameter=names.agent_parameter(role)),
        "drain": Drain(
            timeout_s=cluster.drain.timeout_s,
            lifecycle_hook=names.terminate_hook(role),
            group=names.group(role),
        ),
        "launch": Launch(
            lifecycle_hook=names.launch_hook(role),
            stack=names.stack("router" if role == "router" else "engines"),
            resource=names.logical_id(role),
        ),
    }
