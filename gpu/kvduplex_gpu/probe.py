"""Everything the doctor says about a GPU host, in the order in which things have to be mended."""

from __future__ import annotations

from kvduplex_gpu.nvidia import check_devices, check_driver, check_fabric_manager, check_gdrcopy, nvidia_driver
from kvduplex_gpu.options import Transport
from kvduplex_gpu.software import check_engine, check_variables, engine_cuda
from kvduplex_transfer.host.options import usual_ports
from kvduplex_transfer.hostchecks.agent import check_agent
from kvduplex_transfer.hostchecks.efa import check_efa, efa_devices
from kvduplex_transfer.hostchecks.findings import warn
from kvduplex_transfer.hostchecks.identity import check_instance, instance_type_of
from kvduplex_transfer.hostchecks.instances import Accelerator, InstanceType, instance_type_named
from kvduplex_transfer.hostchecks.limits import check_huge_pages, check_locked_memory, check_open_files
from kvduplex_transfer.hostchecks.nixlplugin import check_nixl_plugin
from kvduplex_transfer.hostchecks.ports import check_ports
from kvduplex_transfer.hostchecks.pythonenv import PythonEnvironment, read_environment
from kvduplex_transfer.hostchecks.variables import check_fabric_variables, check_side_channel
from kvduplex_transfer.interface import Finding, Host, HostReport, NixlSettings, Severity

__all__ = ["probe"]

_DRIVER_OF_GPU = "install the driver's libraries of the loaded module's branch, e.g. `libnvidia-compute-580`"


def probe(host: Host, *, interpreter: str, transport: Transport, settings: NixlSettings) -> HostReport:
    """Read `host` and judge it for engines that run under `interpreter` and transfer by `transport`."""
    instance = instance_type_named(instance_type_of(host) or "")
    environment = read_environment(host, interpreter)
    findings = [
        *_instance(host, instance, transport),
        *check_driver(host, cuda=engine_cuda(environment), rdma=transport is Transport.EFA),
        *check_devices(host, instance),
        *check_fabric_manager(host, instance),
        *_network(host, instance, transport),
        *check_locked_memory(host),
        *check_open_files(host),
        *check_side_channel(host, single_host=transport is Transport.UCX),
        *check_variables(host),
        check_ports(host, usual_ports()),
        *check_engine(environment),
        *_transfer(host, environment, interpreter, settings, transport),
    ]
    return HostReport("gpu", tuple(findings), _facts(host, environment))


def _instance(host: Host, instance: InstanceType | None, transport: Transport) -> list[Finding]:
    if transport is Transport.UCX and (instance is None or instance.accelerator is Accelerator.GPU):
        return []  # any host with GPUs will do
    return check_instance(host, Accelerator.GPU)


def _network(host: Host, instance: InstanceType | None, transport: Transport) -> list[Finding]:
    if transport is Transport.EFA:
        return [
            *check_efa(host, instance, peer="NVIDIA"),
            *check_huge_pages(host),
            *check_fabric_variables(host),
            *check_gdrcopy(host),
        ]
    adapters = [path for path in host.glob("/sys/class/infiniband/*") if "mlx" in path]
    if adapters or not efa_devices(host):
        return []
    why = "UCX does not use EFA for one-sided reads; between hosts it would fall back to TCP"
    return [warn("gpu.transport", "UCX on a host with EFA", "transport efa", why=why, fix="set transport: efa")]


def _transfer(
    host: Host, environment: PythonEnvironment, interpreter: str, settings: NixlSettings, transport: Transport
) -> list[Finding]:
    plugin = check_nixl_plugin(host, environment, cuda_driver=_DRIVER_OF_GPU) if transport is Transport.EFA else []
    if any(finding.severity is Severity.FAIL for finding in plugin) or nvidia_driver(host) is None:
        return plugin  # an agent could only fail for the same reason
    backend = next(iter(settings.backends))
    return plugin + check_agent(
        host, interpreter, backend=backend, memory=settings.memory_type, variables=dict(settings.environment)
    )


def _facts(host: Host, environment: PythonEnvironment) -> dict[str, str]:
    driver = nvidia_driver(host)
    facts = {
        "instance_type": instance_type_of(host),
        "gpus": str(len(host.glob("/proc/driver/nvidia/gpus/*"))),
        "efa_interfaces": str(len(efa_devices(host))),
        "driver": driver.version if driver else None,
        "vllm": environment.version("vllm"),
        "torch": environment.version("torch"),
        "nixl": environment.version("nixl"),
    }
    return {name: value for name, value in facts.items() if value is not None}
