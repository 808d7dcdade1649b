"""What a person asks for with ``kvduplex launch up``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from kvduplex.ec2.errors import RequestError
from kvduplex.node.config import (
    Backend,
    Discovery,
    Drain,
    EngineSettings,
    Keys,
    KeySource,
    Model,
    NodeConfig,
    NodeRole,
    RouterSettings,
)
from kvduplex.node.discovery import CLUSTER_TAG
from kvduplex.node.document import NodeConfigError
from kvduplex.node.engine import LOOPBACK, engine_plan_of, has_replicas, recipe_hosts
from kvduplex.node.values import Name, Region
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.hostchecks.efa_layout import EfaLayout, network_interfaces
from kvduplex_transfer.hostchecks.instances import Accelerator, instance_type_named
from kvduplex_transfer.interface import Role

__all__ = ["Fleet", "LaunchRequest"]

_ACCELERATORS = {Backend.NEURON: Accelerator.NEURON, Backend.GPU: Accelerator.GPU, Backend.HOST: Accelerator.NONE}
_ROUTER_PORT = 8000

InstanceTypeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+\.[a-z0-9]+$")]


class Fleet(BaseModel):
    """Machines of one role."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: Annotated[int, Field(ge=1, le=64)]
    instance_type: InstanceTypeName


class LaunchRequest(BaseModel):
    """One cluster: prefill, decode and router machines in one subnet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cluster: Name
    region: Region
    subnet: Annotated[str, StringConstraints(pattern=r"^subnet-[0-9a-f]{8,17}$")]
    ami: Annotated[str, StringConstraints(pattern=r"^(ami-[0-9a-f]{8,17}|/[A-Za-z0-9_./-]+)$")]
    """Image id, or the SSM parameter that holds one."""
    instance_profile: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+=,.@_-]{1,128}$")]
    backend: Backend
    recipe: str | None = None
    model: Model | None = None
    prefill: Fleet | None = None
    """Left out only with a recipe whose engines do whole turns; `decode` holds those replicas then."""
    decode: Fleet
    router: Fleet = Fleet(count=1, instance_type="c7i.xlarge")
    security_groups: tuple[Annotated[str, StringConstraints(pattern=r"^sg-[0-9a-f]{8,17}$")], ...] = ()
    """Existing groups; one of the cluster's own is made when there are none."""
    efa_layout: EfaLayout = EfaLayout.A
    reservation: Annotated[str, StringConstraints(pattern=r"^cr-[0-9a-f]{8,17}$")] | None = None
    """Capacity reservation or capacity block of the engines."""
    capacity_block: bool = False
    """Whether `reservation` is a capacity block."""
    client_keys: str | None = None
    """Secret with the clients' keys; without it the router listens on its own machine alone."""
    engine_key: str | None = None
    """Secret with the key that the router presents to engines."""
    volume_gib: Annotated[int, Field(ge=20, le=16_384)] = 500
    drain_timeout_s: Annotated[int, Field(ge=0, le=7200)] = 120
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the recipe to change."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Check what was asked for.

        Raises:
            RequestError: Every wrong value on a line of its own.
        """
        try:
            return cls.model_validate({key: value for key, value in values.items() if value is not None})
        except ValidationError as error:
            raise RequestError(
                "\n".join(_line(item["loc"], item["msg"], item["input"]) for item in error.errors())
            ) from error

    @property
    def fleets(self) -> Mapping[NodeRole, Fleet]:
        """Machines by role, in the order they are started: engines first, since they take longest."""
        fleets = {NodeRole.PREFILL: self.prefill, NodeRole.DECODE: self.decode, NodeRole.ROUTER: self.router}
        return {role: fleet for role, fleet in fleets.items() if fleet is not None}

    @property
    def replicas(self) -> bool:
        """Whether the engines do whole turns, each by itself."""
        return self.prefill is None

    def node(self, role: NodeRole) -> NodeConfig:
        """The node file of a machine of `role`."""
        keys = Keys(clients=_source(self.client_keys), engines=_source(self.engine_key))
        if role is NodeRole.ROUTER:
            return NodeConfig(
                cluster=self.cluster,
                role=role,
                region=self.region,
                router=RouterSettings(bind_host="0.0.0.0" if self.client_keys else "127.0.0.1", port=_ROUTER_PORT),
                discovery=Discovery(ec2_tags={CLUSTER_TAG: self.cluster}),
                keys=keys,
                drain=Drain(timeout_s=self.drain_timeout_s),
            )
        return NodeConfig(
            cluster=self.cluster,
            role=role,
            region=self.region,
            backend=self.backend,
            recipe=self.recipe,
            model=self.model,
            engine=EngineSettings(options=self.options),
            keys=Keys(engines=keys.engines),
            drain=Drain(timeout_s=self.drain_timeout_s),
        )

    @model_validator(mode="after")
    def _types_fit(self) -> Self:
        for role in self.fleets.keys() - {NodeRole.ROUTER}:
            self._check_engine_type(role, self.fleets[role].instance_type)
        if self.capacity_block and self.reservation is None:
            raise ValueError("capacity_block: name the block with --reservation cr-...")
        if self.reservation and self.prefill and self.prefill.instance_type != self.decode.instance_type:
            raise ValueError("reservation: holds one instance type; make those of prefill and decode equal")
        self._check_topology()
        for role, fleet in self.fleets.items():
            self.node(role)
            if role is not NodeRole.ROUTER:
                self._check_recipe(role, fleet.instance_type)
        return self

    def _check_recipe(self, role: NodeRole, name: str) -> None:
        """A machine would refuse its recipe or options only once it is paid for."""
        hosts = recipe_hosts(self.backend, self.recipe)
        if hosts and name not in hosts:
            raise ValueError(f"{role}: recipe {self.recipe} is for {' or '.join(hosts)}, not for {name}")
        try:
            engine_plan_of(self.node(role), Role(role.value), address=LOOPBACK, interpreter="python")
        except NodeConfigError as error:
            raise ValueError(str(error)) from error

    def _check_topology(self) -> None:
        wanted = has_replicas(self.backend, self.recipe)
        if wanted and not self.replicas:
            raise ValueError(f"prefill: recipe {self.recipe} has no prefill/decode split; say --prefill 0")
        if self.replicas and not wanted:
            raise ValueError("prefill: needs at least one machine; only recipes of replicas go without")

    def _check_engine_type(self, role: str, name: str) -> None:
        row, wanted = instance_type_named(name), _ACCELERATORS[self.backend]
        found = row.accelerator if row else Accelerator.NONE
        if found is not wanted:
            raise ValueError(f"{role}: {name} has {_devices(found)}, backend {self.backend} needs {_devices(wanted)}")
        if row is not None and wanted is not Accelerator.NONE and not row.device_rdma:
            raise ValueError(f"{role}: {name} cannot move KV between machines: {row.obstacle}")
        try:
            network_interfaces(name, self.efa_layout)
        except ConfigError as error:
            raise ValueError(f"{role}: {error}") from error


def _devices(accelerator: Accelerator) -> str:
    return "no accelerators" if accelerator is Accelerator.NONE else f"{accelerator} devices"


def _source(secret: str | None) -> KeySource | None:
    return None if secret is None else KeySource(secret=secret)


def _line(place: tuple[int | str, ...], message: str, value: object) -> str:
    key = ".".join(str(part) for part in place)
    text = message.removeprefix("Value error, ")
    seen = f", got {value!r:.80}" if isinstance(value, str | int) else ""
    return f"{key}: {text[0].lower()}{text[1:]}{seen}" if key else text
