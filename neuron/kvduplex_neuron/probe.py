"""Everything the doctor says about a Neuron host, in the order in which things have to be mended."""

from __future__ import annotations

from kvduplex_neuron.devices import (
    NeuronDevice,
    check_devices,
    check_driver,
    check_usage,
    neuron_devices,
    neuron_family,
)
from kvduplex_neuron.lines import Family, family_of_instance, line_of
from kvduplex_neuron.software import check_engine, check_runtime, check_variables
from kvduplex_transfer.host.options import usual_ports
from kvduplex_transfer.hostchecks.agent import check_agent
from kvduplex_transfer.hostchecks.efa import check_efa, efa_devices
from kvduplex_transfer.hostchecks.findings import fail, ok
from kvduplex_transfer.hostchecks.identity import check_instance, instance_type_of
from kvduplex_transfer.hostchecks.instances import Accelerator, instance_type_named
from kvduplex_transfer.hostchecks.limits import check_huge_pages, check_locked_memory, check_open_files
from kvduplex_transfer.hostchecks.nixlplugin import check_nixl_plugin
from kvduplex_transfer.hostchecks.ports import check_ports
from kvduplex_transfer.hostchecks.pythonenv import PythonEnvironment, read_environment
from kvduplex_transfer.hostchecks.variables import check_fabric_variables, check_side_channel
from kvduplex_transfer.interface import Finding, Host, HostReport, NixlSettings, Severity
from kvduplex_transfer.recipes import Direction

__all__ = ["probe"]

_ONE_RAIL_A_DEVICE = frozenset({Family.TRN2, Family.TRN3})


def probe(host: Host, *, interpreter: str, settings: NixlSettings) -> HostReport:
    """Read `host` and judge it for engines that run under `interpreter`."""
    instance = instance_type_named(instance_type_of(host) or "")
    devices = neuron_devices(host)
    family = neuron_family(host) or family_of_instance(instance_type_of(host) or "")
    environment = read_environment(host, interpreter)
    findings = [
        *check_instance(host, Accelerator.NEURON),
        *check_driver(host),
        *check_devices(host, devices, instance),
        *check_usage(devices),
        *check_runtime(host, rails=_moves_kv(environment)),
        *check_efa(host, instance, peer="NEURON"),
        *_rails(host, devices, family),
        *check_locked_memory(host),
        *check_open_files(host),
        *check_huge_pages(host),
        *check_fabric_variables(host),
        *check_side_channel(host),
        *check_variables(host),
        check_ports(host, usual_ports()),
        *check_engine(host, environment, family),
    ]
    if _moves_kv(environment):
        findings += _transfer(host, environment, interpreter, settings)
    return HostReport("neuron", tuple(findings), _facts(host, devices, family, environment))


def _moves_kv(environment: PythonEnvironment) -> bool:
    line = line_of(environment.version("vllm-neuron"))
    return line is None or line.direction is not Direction.NONE


def _transfer(host: Host, environment: PythonEnvironment, interpreter: str, settings: NixlSettings) -> list[Finding]:
    plugin = check_nixl_plugin(host, environment)
    if any(finding.severity is Severity.FAIL for finding in plugin):
        return plugin  # an agent could only fail for the same reason
    backend = next(iter(settings.backends))
    return plugin + check_agent(
        host, interpreter, backend=backend, memory=settings.memory_type, variables=dict(settings.environment)
    )


def _rails(host: Host, devices: tuple[NeuronDevice, ...], family: Family | None) -> list[Finding]:
    rails = len(efa_devices(host))
    if family not in _ONE_RAIL_A_DEVICE or not devices or not rails:
        return []
    seen, expected = f"{rails} EFA interfaces for {len(devices)} Neuron devices", "one EFA interface per Neuron device"
    if rails >= len(devices):
        return [ok("neuron.rails", seen, expected)]
    return [
        fail(
            "neuron.rails",
            seen,
            expected,
            why="memory of a Neuron device can be registered only by the EFA interface next to it: fi_mr_reg answers "
            "EINVAL for the others",
            fix="relaunch with an EFA interface on every network card; trn2.3xlarge cannot have them",
        )
    ]


def _facts(
    host: Host, devices: tuple[NeuronDevice, ...], family: Family | None, environment: PythonEnvironment
) -> dict[str, str]:
    facts = {
        "instance_type": instance_type_of(host),
        "family": family,
        "neuron_devices": str(len(devices)),
        "logical_cores": str(sum(device.cores for device in devices)),
        "efa_interfaces": str(len(efa_devices(host))),
        "vllm": environment.version("vllm"),
        "vllm_neuron": environment.version("vllm-neuron"),
        "nixl": environment.version("nixl"),
    }
    return {name: str(value) for name, value in facts.items() if value is not None}
