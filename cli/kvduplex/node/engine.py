"""From the node file to the plan of one engine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvduplex.node.config import Backend, NodeConfig, NodeRole
from kvduplex.node.document import NodeConfigError
from kvduplex.node.weights import model_folder
from kvduplex_gpu.backend import GpuBackend, gpu_recipes
from kvduplex_gpu.options import GpuOptions, Transport
from kvduplex_neuron.backend import NeuronBackend, neuron_recipes
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.host import HostBackend
from kvduplex_transfer.interface import EnginePlan, RecipeLike, Role, TransferBackend
from kvduplex_transfer.recipes import Catalogue, Recipe, Topology

__all__ = ["LOOPBACK", "backend_of", "engine_plan_of", "has_replicas", "recipe_hosts"]

LOOPBACK = "127.0.0.1"
_STREAM_PARAMS = "kvduplex_connector.stream_params.StreamParamsMiddleware"
_BACKENDS: Mapping[Backend, Callable[..., TransferBackend]] = {
    Backend.HOST: HostBackend,
    Backend.NEURON: NeuronBackend,
    Backend.GPU: GpuBackend,
}
_CATALOGUES: Mapping[Backend, Callable[[], Catalogue]] = {Backend.NEURON: neuron_recipes, Backend.GPU: gpu_recipes}


@dataclass(frozen=True, slots=True)
class _HostRecipe:
    """What the host backend plans from: it has no recipe files."""

    name: str
    model: str
    settings: Mapping[str, Any]

    def options(self, role: Role) -> Mapping[str, Any]:
        """Settings, the same for any `role`: a machine plans its own."""
        del role
        return self.settings


def backend_of(config: NodeConfig, *, interpreter: str) -> TransferBackend:
    """The backend of this machine's engines, with the transport of their recipe.

    Raises:
        NodeConfigError: The node file names none, or a recipe that is unknown or wrong.
    """
    if config.backend is None:
        raise NodeConfigError(f"backend: role {config.role} has no engines; name one of {', '.join(Backend)}")
    if config.backend is Backend.GPU and config.recipe is not None and config.engine_roles:
        return GpuBackend(interpreter=interpreter, transport=_transport(config))
    return _BACKENDS[config.backend](interpreter=interpreter)


def has_replicas(backend: Backend, recipe: str | None) -> bool:
    """Whether the engines of `recipe` do whole turns; False for an unknown one, which planning refuses."""
    found = _known(backend, recipe)
    return found is not None and found.topology is Topology.REPLICAS


def recipe_hosts(backend: Backend, recipe: str | None) -> tuple[str, ...]:
    """EC2 types that `recipe` was written for; empty for any, and for an unknown recipe, which planning refuses."""
    found = _known(backend, recipe)
    return () if found is None else found.hosts.instance_types


def _known(backend: Backend, recipe: str | None) -> Recipe | None:
    if recipe is None or (catalogue := _CATALOGUES.get(backend)) is None:
        return None
    try:
        return catalogue().load(recipe)
    except ConfigError:
        return None


def engine_plan_of(config: NodeConfig, role: Role, *, address: str, interpreter: str) -> EnginePlan:
    """Command and environment of this machine's engine of `role`.

    Args:
        config: The node file.
        role: One of its `NodeConfig.engine_roles`.
        address: Where peers and the router reach this machine; `LOOPBACK` when all are on it.
        interpreter: Python of the engine.

    Raises:
        NodeConfigError: The machine has no such role, or a setting does not fit the backend or recipe.
    """
    if role not in config.engine_roles:
        raise NodeConfigError(
            f"role: this machine is {config.role}, so it runs no {role} engine; change role, or the unit"
        )
    settings = _settings(config, role, address)
    backend = backend_of(config, interpreter=interpreter)
    try:
        return backend.engine_plan(_recipe(config, settings), role)
    except ConfigError as error:
        raise NodeConfigError(f"engine.options or recipe: {error}") from error


def _transport(config: NodeConfig) -> Transport:
    role = config.engine_roles[0]
    try:
        recipe = gpu_recipes().load(config.recipe or "").overridden(config.engine.options, model=None)
        return GpuOptions.parse(recipe.options(role), where=f"recipe {recipe.name}, {role}").transport
    except ConfigError as error:
        raise NodeConfigError(f"engine.options or recipe: {error}") from error


def _recipe(config: NodeConfig, settings: Mapping[str, Any]) -> RecipeLike:
    model = _model(config)
    if config.backend is not None and (catalogue := _CATALOGUES.get(config.backend)) is not None:
        return catalogue().load(config.recipe or "").overridden(settings, model=model)
    return _HostRecipe(name=config.recipe or "host", model=model or "", settings=settings)


def _model(config: NodeConfig) -> str | None:
    if config.model is None:
        return None
    return str(model_folder(config.model)) if config.model.source else config.model.id


def _settings(config: NodeConfig, role: Role, address: str) -> dict[str, Any]:
    """Settings of the recipe that the node file decides; what it leaves out stays the recipe's."""
    engine, accelerated = config.engine, config.backend is not Backend.HOST
    bound = address if address == LOOPBACK else "0.0.0.0"
    settings: dict[str, Any] = {"bind_host": bound, "advertised_host": address}
    for name in ("http_port", "side_channel_port", "lease_port", "connector"):
        if (value := getattr(engine, name)) is not None:
            settings[name] = value
    settings |= {name: getattr(config.leases, name) for name in sorted(config.leases.model_fields_set)}
    settings |= _model_settings(config, accelerated=accelerated)
    if accelerated:
        settings |= {"cache_dir": config.compile_cache.folder, "ready_timeout_s": engine.start_timeout_s}
    else:
        settings |= _host_settings(config, role)
    return settings | dict(engine.options)


def _model_settings(config: NodeConfig, *, accelerated: bool) -> dict[str, Any]:
    model = config.model
    if model is None:
        return {}
    settings: dict[str, Any] = {}
    if (served := model.served_name or (model.id if model.source else None)) is not None:
        settings["served_model_name"] = served
    if not model.is_local and model.source is None:
        flags = ("--revision", model.revision) if model.revision else ()
        folder = {"download_dir": model.folder} if accelerated else {}
        extra = {"flags" if accelerated else "extra_argv": flags} if flags else {}
        settings |= folder | extra | {"environment": {"HF_HOME": f"{model.folder}/.hub"}}
    return settings


def _host_settings(config: NodeConfig, role: Role) -> dict[str, Any]:
    alone = config.role is not NodeRole.ALL
    stock = config.engine.connector in {None, ConnectorKind.STOCK}
    settings: dict[str, Any] = {}
    if alone:
        other = "decode_engines" if role is Role.PREFILL else "prefill_engines"
        settings[other] = 0
    if stock and role is Role.DECODE:
        # Up to 0.32, stock vLLM tells where KV lies only in answers that are not streamed.
        settings["middleware"] = (_STREAM_PARAMS,)
    return settings
