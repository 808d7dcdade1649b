"""The connectors vLLM loads: ``kv_connector_module_path`` is this module, ``kv_connector`` the class's name.

`LeasedNixlConnector` stands here. Any other NIXL pull connector that is registered with vLLM, by a platform's plugin
for instance, is found with ``Leased`` in front of its name: ``LeasedNeuronNixlConnector`` puts leases over
``NeuronNixlConnector``.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector, NixlPullConnector

from kvduplex_connector import compat
from kvduplex_connector.scheduler_side import SchedulerLeases
from kvduplex_connector.settings import LeaseSettings
from kvduplex_connector.stats import LeaseKVConnectorStats, LeasePromMetrics
from kvduplex_connector.worker_side import WorkerLeases

__all__ = ["LeasedConnector", "LeasedNixlConnector"]

_PREFIX: Final = "Leased"


class LeasedConnector(SchedulerLeases, WorkerLeases):
    """Leases over the NIXL pull connector that stands behind it in a class's bases.

    Raises:
        LeaseConfigError: A setting is wrong or the vLLM version is not supported; the engine does not start.
    """

    connector_worker: Any

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        compat.share_logging()
        compat.check_version(compat.engine_version())
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = LeaseSettings.parse(extra)
        with compat.resting_agent(role == KVConnectorRole.WORKER, extra):
            super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        if role == KVConnectorRole.SCHEDULER:
            self._set_up_scheduler(settings)
        else:
            self._set_up_worker()

    def get_kv_connector_stats(self) -> LeaseKVConnectorStats | None:
        """What happened since the last call, in either process."""
        if self.connector_worker is None:
            return self._scheduler_stats()
        return self._with_leases(super().get_kv_connector_stats())  # type: ignore[misc]

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LeaseKVConnectorStats:
        """Statistics from what travelled between processes."""
        return LeaseKVConnectorStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> LeasePromMetrics:
        """Metrics of the base connector and of leases."""
        return LeasePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close connections and end the lease endpoint. Idempotent."""
        if self.connector_worker is None:
            self._shut_down_scheduler()
        super().shutdown()  # type: ignore[misc]


class LeasedNixlConnector(LeasedConnector, NixlConnector):  # type: ignore[misc]
    """vLLM's ``NixlConnector`` with leases."""


def __getattr__(name: str) -> type[LeasedConnector]:
    """The leased form of a registered connector.

    Raises:
        AttributeError: The name is not one, or the connector does not pull over NIXL.
    """
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    base_name = name.removeprefix(_PREFIX)
    try:
        base = KVConnectorFactory.get_connector_class_by_name(base_name)
    except ValueError as error:
        raise AttributeError(f"{name}: vLLM knows no connector {base_name}; is the platform's plugin there?") from error
    if not issubclass(base, NixlPullConnector):
        why = f"{name}: {base_name} does not pull over NIXL, so there is no read that a claim could guard"
        raise AttributeError(why)  # noqa: TRY004 - a module's missing attribute
    leased = type(name, (LeasedConnector, base), {"__doc__": f"``{base_name}`` with leases.", "__module__": __name__})
    globals()[name] = leased
    return leased
