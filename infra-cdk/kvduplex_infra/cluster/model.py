"""The schema of a cluster file. Times are in seconds unless a name says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kvduplex.node.config import Backend, Drain, Leases
from kvduplex.node.values import Name as ClusterName
from kvduplex.node.values import Region as RegionName
from kvduplex.node.values import S3Url
from kvduplex_infra.cluster.access import Access, Keys, Network
from kvduplex_infra.cluster.capacity import Capacity, OnDemand
from kvduplex_infra.cluster.container import Container
from kvduplex_infra.cluster.image import Image
from kvduplex_infra.cluster.operations import Alarms, Budget, State
from kvduplex_infra.cluster.recipes import read_recipe
from kvduplex_infra.cluster.section import Section, Zone
from kvduplex_infra.errors import ClusterFileError
from kvduplex_transfer.hostchecks.efa_layout import EfaLayout

__all__ = ["Cluster", "Fleet", "Model", "RouterFleet"]

InstanceTypeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")]


class Model(Section):
    """Which weights are served."""

    id: Annotated[str, StringConstraints(pattern=r"^[^\s]+$")]
    """Hub id, or absolute folder of a model in the image."""
    revision: str | None = None
    source: S3Url | None = None
    """S3 prefix to copy the weights from instead of the hub."""
    parameters_b: Annotated[float, Field(gt=0)] | None = None
    """Parameters in thousand millions, for models that the built-in table does not know."""
    bytes_per_parameter: Annotated[float, Field(gt=0, le=8)] = 2.0
    """2 for bf16 and fp16, 1 for fp8, 4 for float32."""


class Fleet(Section):
    """The engines of one role; one engine an instance."""

    instance_type: InstanceTypeName
    count: Annotated[int, Field(ge=1, le=64)]
    capacity: Capacity = OnDemand()
    efa_layout: EfaLayout = EfaLayout.A
    """Arrangement of the network interfaces; B for images and tools that need an address a card."""
    efa_interfaces: Annotated[int, Field(ge=0)] | None = None
    """EFA interfaces; every one the type has when not given, 0 for none."""
    volume_gib: Annotated[int, Field(ge=30, le=16_384)] = 200
    """Root volume, which holds weights and compiled graphs too."""
    volume_mibps: Annotated[int, Field(ge=125, le=1000)] = 125
    """Throughput of that volume in MiB/s; weights are read from it at every start of an engine."""
    start_timeout_s: Annotated[int, Field(ge=300, le=43_200)] = 7200
    """Longest time from launch to readiness; a first compile on Neuron takes tens of minutes."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the recipe to change, by their name there."""


class RouterFleet(Section):
    """The routers behind the load balancer: machines of their own, or containers on Fargate."""

    platform: Literal["ec2", "ecs"] = "ec2"
    container: Container | None = None
    """Needed with ``platform: ecs``, where `instance_type` and `image` say nothing."""
    instance_type: InstanceTypeName = "c7i.xlarge"
    count: Annotated[int, Field(ge=1, le=32)] = 2
    image: Image | None = None
    """The engines' image when not given; any flavour holds the router."""
    on_no_prefill: Literal["fail", "decode_only"] = "fail"
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Further keys of the router's own configuration."""

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        if self.platform == "ec2" and self.container is not None:
            raise ValueError("container belongs to platform: ecs; remove it, or set platform: ecs")
        if self.platform == "ecs" and self.container is None:
            raise ValueError("platform: ecs needs container.image, REGISTRY/NAME@sha256:DIGEST (docs/deploy-aws.md)")
        if self.platform == "ecs" and (foreign := sorted({"instance_type", "image"} & self.model_fields_set)):
            raise ValueError(
                f"{foreign[0]} belongs to platform: ec2; remove it, containers have container.vcpus and image"
            )
        return self


class Cluster(Section):
    """One cluster of prefill engines, decode engines and routers in one region."""

    version: Literal[1] = 1
    name: ClusterName
    region: RegionName
    zone: Zone
    """Where all engines stand: EFA traffic does not leave a zone."""
    router_zones: tuple[Zone, ...] = ()
    """At least two; `zone` and its neighbour when not given."""
    backend: Backend
    recipe: str | None = None
    connector: Literal["leased", "stock"] = "leased"
    """KV connector of prefill and decode engines: claims before every read, or vLLM's own; replicas have none."""
    model: Model | None = None
    """The recipe's model, from the hub, when not given."""
    compile_cache: S3Url | None = None
    """S3 prefix with graphs compiled earlier; only Neuron compiles for minutes."""
    image: Image
    prefill: Fleet | None = None
    """Left out only with a recipe whose engines do whole turns; then `decode` is the fleet of those replicas."""
    decode: Fleet
    router: RouterFleet = RouterFleet()
    access: Access = Access()
    keys: Keys = Keys()
    network: Network = Network()
    state: State = State()
    leases: Leases = Leases()
    drain: Drain = Drain()
    alarms: Alarms = Alarms()
    budget: Budget | None = None
    unlisted_offering: bool = False
    """Go on where the built-in tables do not list a type in the region; only after asking EC2 (docs/deploy-aws.md)."""
    tags: Mapping[str, str] = Field(default_factory=dict)
    """Further tags on every resource, e.g. a cost centre."""

    @model_validator(mode="after")
    def _no_foreign_hook(self) -> Self:
        if self.drain.lifecycle_hook is not None:
            raise ValueError("drain: lifecycle_hook and group are set by the fleets themselves; remove them")
        return self

    @model_validator(mode="after")
    def _keys_exist(self) -> Self:
        if self.keys.clients == "none":
            where = "the internet" if self.access.mode == "public" else "the network"
            raise ValueError(
                f"keys.clients: none with access.mode {self.access.mode} would serve {where} without keys; "
                "use generate, or the ARN of a secret"
            )
        return self

    @property
    def fleets(self) -> Mapping[str, Fleet]:
        """The engine fleets by role."""
        return {role: fleet for role, fleet in (("prefill", self.prefill), ("decode", self.decode)) if fleet}

    @property
    def replicas(self) -> bool:
        """Whether the engines of `decode` do whole turns."""
        return self.prefill is None

    @property
    def served(self) -> Model:
        """The model that is served; `model` as the file gives it, else the recipe's."""
        if self.model is not None:
            return self.model
        if self.recipe is None:
            raise ClusterFileError("model: missing, and there is no recipe to name one; give model.id")
        return Model(id=read_recipe(self.backend, self.recipe).model)

    @property
    def shares_state(self) -> bool:
        """Whether the routers have a store in common."""
        return self.router.count > 1 if self.state.enabled is None else self.state.enabled

    @property
    def router_image(self) -> Image:
        """Image of the router's machines."""
        return self.router.image or self.image
