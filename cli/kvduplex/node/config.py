"""The schema of ``/etc/kvduplex/node.yaml``: what one machine is in its cluster.

Times are in seconds unless a name says otherwise, sizes in bytes. Unknown keys are refused everywhere, so that a
misspelt setting stops the machine instead of being ignored by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from kvduplex.node.values import AbsolutePath, EngineUrl, Name, Port, Region, S3Url, SecretId, StateUrl
from kvduplex_transfer.interface import Role

__all__ = [
    "NODE_FILE",
    "NODE_VARIABLE",
    "Backend",
    "CompileCache",
    "Discovery",
    "Drain",
    "EngineSettings",
    "KeySource",
    "Keys",
    "Launch",
    "Leases",
    "Logging",
    "Model",
    "NodeConfig",
    "NodeRole",
    "RouterSettings",
    "State",
]

NODE_FILE = "/etc/kvduplex/node.yaml"
"""Where a machine's configuration lies."""
NODE_VARIABLE = "KVDUPLEX_NODE"
"""Environment variable with the file's text, for containers, which have no user data."""


class NodeRole(StrEnum):
    """What a machine does."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    ALL = "all"
    """One prefill engine, one decode engine and the router on one machine: for trying things out."""


class Backend(StrEnum):
    """Which accelerator the engines compute on."""

    HOST = "host"
    NEURON = "neuron"
    GPU = "gpu"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Section):
    """Which weights are served, and where they come from and go to."""

    id: Annotated[str, StringConstraints(pattern=r"^[^\s]+$")]
    """Hub id, or absolute folder of a model that lies on the machine."""
    revision: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]+$")] | None = None
    """Commit or tag of a hub id; a hub id without it follows the hub's default branch."""
    source: S3Url | None = None
    """S3 prefix to copy the weights from; the hub when not given."""
    folder: AbsolutePath = "/var/lib/kvduplex/models"
    """Where weights are kept; instance storage when the machine has some."""
    served_name: Annotated[str, StringConstraints(pattern=r"^[^\s]+$")] | None = None
    """Name that clients ask for; `id` when not given."""

    @property
    def is_local(self) -> bool:
        """Whether `id` is a folder."""
        return self.id.startswith("/")

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        if self.is_local and (self.source or self.revision):
            raise ValueError("id is a folder, so source and revision do not apply; remove them or give a hub id")
        return self


class CompileCache(_Section):
    """Where compiled model graphs are kept between starts; only Neuron compiles for minutes."""

    folder: AbsolutePath = "/var/lib/kvduplex/compile-cache"
    source: S3Url | None = None
    """S3 prefix with graphs compiled earlier, copied before the first start."""


class EngineSettings(_Section):
    """One engine of this machine. Ports left out are the role's usual ones."""

    http_port: Port | None = None
    side_channel_port: Port | None = None
    lease_port: Port | None = None
    advertised_host: str | None = None
    """Address peers dial; the machine's primary private address when not given."""
    connector: Literal["leased", "stock"] | None = None
    """KV connector; the recipe's own when not given."""
    start_timeout_s: Annotated[int, Field(ge=1, le=86_400)] = 7200
    """Longest time from start to readiness; a first compile on Neuron takes tens of minutes."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the recipe to change, by their name there, e.g. ``max_model_len: 32768``."""


class RouterSettings(_Section):
    """The router of this machine."""

    bind_host: str = "127.0.0.1"
    port: Port = 8000
    on_no_prefill: Literal["fail", "decode_only"] = "fail"
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Further keys of the router's own configuration file."""


class Discovery(_Section):
    """How a router finds its engines: by their addresses, or by the tags of EC2 instances."""

    prefill: tuple[EngineUrl, ...] = ()
    decode: tuple[EngineUrl, ...] = ()
    """With ``#lease=HOST:PORT`` when the engine serves leases."""
    ec2_tags: Mapping[str, str] = Field(default_factory=dict)
    """Tags that every engine's instance carries; its role is read from the tag ``kvduplex:role``."""
    refresh_s: Annotated[float, Field(ge=5, le=3600)] = 15.0
    """Time between two looks at EC2."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.ec2_tags and (self.prefill or self.decode):
            raise ValueError("ec2_tags and fixed addresses (prefill, decode) exclude each other; keep one")
        return self

    @property
    def is_empty(self) -> bool:
        """Whether nothing is configured."""
        return not (self.prefill or self.decode or self.ec2_tags)


class KeySource(_Section):
    """Where secret keys are read from, one a line; exactly one of the two."""

    secret: SecretId | None = None
    """Name or ARN of a Secrets Manager secret."""
    file: AbsolutePath | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.secret is None) == (self.file is None):
            raise ValueError("give exactly one of secret (name or ARN in Secrets Manager) and file")
        return self


class Keys(_Section):
    """API keys. Never the keys themselves: this file comes from user data, which an instance's owner can read."""

    clients: KeySource | None = None
    """Keys that clients present to the router."""
    engines: KeySource | None = None
    """The one key that the router presents to engines."""


class State(_Section):
    """The store through which routers share what they remember; without a URL each keeps it to itself."""

    url: StateUrl | None = None
    """``valkeys://USER@HOST:PORT`` with TLS, as the router's own key ``state.url``; a password may not stand in it."""
    password: KeySource | None = None
    """The password of that user; one line."""

    @model_validator(mode="after")
    def _nothing_without_url(self) -> Self:
        if self.url is None and self.password is not None:
            raise ValueError("password is given without url; write url: valkeys://USER@HOST:PORT")
        return self


class Leases(_Section):
    """How long a decode engine keeps a turn's KV blocks; the connector's settings of the same names."""

    lease_ttl_s: Annotated[float, Field(gt=0)] = 30.0
    decoder_kv_blocks_ttl: Annotated[int, Field(ge=1)] = 480
    """Longest time blocks are kept, renewed or not, in seconds."""
    retention_budget: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a decode engine's KV blocks that leases may hold."""
    kv_recompute_threshold: Annotated[int, Field(ge=0)] = 64
    """Fewest tokens worth pulling instead of recomputing."""

    @model_validator(mode="after")
    def _ttl_fits(self) -> Self:
        if self.lease_ttl_s > self.decoder_kv_blocks_ttl:
            raise ValueError(
                f"lease_ttl_s {self.lease_ttl_s:g} is longer than decoder_kv_blocks_ttl {self.decoder_kv_blocks_ttl}, "
                "which ends every lease; lower it"
            )
        return self


class Logging(_Section):
    """What the machine's services write down. Prompts are never among it."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    folder: AbsolutePath = "/var/log/kvduplex"
    log_group: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_/.#-]{1,512}$")] | None = None
    """CloudWatch log group that the agent ships the folder to."""
    relay: bool = False
    """Whether the router's log goes to standard output as well, as containers are read; its file is then kept short."""
    agent_parameter: Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9_./-]{1,1000}$")] | None = None
    """SSM parameter with the CloudWatch agent's configuration; the agent is not started without."""


class Drain(_Section):
    """What happens between the order to stop and the stop."""

    timeout_s: Annotated[int, Field(ge=0, le=7200)] = 120
    """Longest time that turns in flight and leases may take to end."""
    lifecycle_hook: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_/-]{1,255}$")] | None = None
    """Auto Scaling lifecycle hook to complete once drained."""
    group: Annotated[str, StringConstraints(pattern=r"^[^:]{1,255}$")] | None = None
    """Auto Scaling group of that hook."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.lifecycle_hook is None) != (self.group is None):
            raise ValueError("lifecycle_hook and group belong together; give both or neither")
        return self


class Launch(_Section):
    """Whom a machine of an Auto Scaling group tells that it is ready, or broken."""

    lifecycle_hook: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_/-]{1,255}$")]
    """Hook of `Drain.group` that holds the machine back until it is ready."""
    stack: Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,127}$")]
    """CloudFormation stack that waits for its signal."""
    resource: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]{1,255}$")]
    """Logical id of the group in that stack."""
    fault_after_s: Annotated[int, Field(ge=30, le=86_400)] = 300
    """How long a service that was ready may be silent before the machine has itself replaced."""


class NodeConfig(_Section):
    """Everything one machine must know to take its place in a cluster."""

    version: Literal[1] = 1
    """Version of this schema."""
    cluster: Name
    role: NodeRole
    backend: Backend | None = None
    """Needed by engines, absent on a pure router."""
    recipe: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]+$")] | None = None
    """Recipe of the backend, by name; the host backend runs without one."""
    model: Model | None = None
    region: Region | None = None
    """AWS region of the services used; the instance's own when not given."""
    compile_cache: CompileCache = CompileCache()
    engine: EngineSettings = EngineSettings()
    router: RouterSettings = RouterSettings()
    discovery: Discovery = Discovery()
    keys: Keys = Keys()
    state: State = State()
    leases: Leases = Leases()
    logging: Logging = Logging()
    drain: Drain = Drain()
    launch: Launch | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _role_from_transfer(cls, value: object) -> object:
        return value.value if isinstance(value, Role) else value

    @model_validator(mode="after")
    def _role_has_its_settings(self) -> Self:
        if self.role is NodeRole.ROUTER:
            self._check_router()
        else:
            self._check_engine()
        return self

    def _check_router(self) -> None:
        if self.discovery.is_empty:
            raise ValueError("discovery: a router needs its engines; give prefill and decode addresses, or ec2_tags")
        if not self.discovery.ec2_tags and not (self.discovery.prefill and self.discovery.decode):
            raise ValueError("discovery: give at least one prefill and one decode address")
        if self.router.bind_host not in {"127.0.0.1", "::1", "localhost"} and self.keys.clients is None:
            raise ValueError(
                f"keys.clients: router.bind_host {self.router.bind_host} is reachable from other machines, so clients "
                "must present a key; give secret or file, or bind 127.0.0.1"
            )

    def _check_engine(self) -> None:
        if self.backend is None:
            raise ValueError(f"backend: role {self.role} needs one of {', '.join(Backend)}")
        if self.backend is not Backend.HOST and self.recipe is None:
            raise ValueError(
                f"recipe: backend {self.backend} needs one; `kvduplex serve {self.backend} --help` lists them"
            )
        ports = ("http_port", "side_channel_port", "lease_port")
        given = [name for name in ports if getattr(self.engine, name) is not None]
        if self.role is NodeRole.ALL and given:
            raise ValueError(
                f"engine.{given[0]}: role all runs two engines, which cannot share a port; leave it out, "
                "and each has its role's usual ports"
            )
        if self.state.url is not None and not self.runs_router:
            raise ValueError(f"state.url: role {self.role} runs no router, which alone uses the store; remove it")
        if self.model is None and self.recipe is None:
            raise ValueError("model: give model.id (a hub id or an absolute folder) or a recipe that names one")

    @property
    def engine_roles(self) -> tuple[Role, ...]:
        """Roles of the engines on this machine."""
        if self.role is NodeRole.ALL:
            return (Role.PREFILL, Role.DECODE)
        return () if self.role is NodeRole.ROUTER else (Role(self.role.value),)

    @property
    def runs_router(self) -> bool:
        """Whether a router runs on this machine."""
        return self.role in {NodeRole.ROUTER, NodeRole.ALL}
