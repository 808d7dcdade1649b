"""Software that Neuron engines need: the runtime library, vLLM with the right plugin, and an unspoilt environment."""

from __future__ import annotations

from kvduplex_neuron.lines import LINES, Family, PluginLine, line_of
from kvduplex_transfer.hostchecks.elf import mentions_symbol
from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.hostchecks.loader import Loader, real_path
from kvduplex_transfer.hostchecks.pythonenv import PythonEnvironment, check_placeholders
from kvduplex_transfer.interface import Finding, Host
from kvduplex_transfer.recipes import Direction

__all__ = ["check_engine", "check_runtime", "check_variables"]

_RUNTIME = "libnrt.so.1"
_RUNTIME_FOLDER = "/opt/aws/neuron/lib"
_RAIL_SYMBOL = "nrt_get_attached_efa_bdf"
_PLACEHOLDERS = ("vllm-neuron", "torch-neuronx", "neuronx-distributed", "neuronx-cc", "libneuronxla", "nki")
_DLAMI = "/opt/aws_neuronx_venv_pytorch_inference_vllm_*"
_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
_GET_ENGINE = (
    "install kvduplex into the environment of a Neuron DLAMI (/opt/aws_neuronx_venv_pytorch_inference_vllm_*/bin/pip "
    f"install kvduplex), or clone vllm-project/vllm-neuron and `pip install {_INDEX} -e .`"
)


def check_runtime(host: Host, *, rails: bool) -> list[Finding]:
    """Can NIXL and libfabric load the Neuron runtime, and is it new enough to name a device's rail?

    Args:
        host: Machine to read.
        rails: Whether KV is to move over rails at all.
    """
    expected = f"{_RUNTIME} on the loader path"
    path = Loader(host).find(_RUNTIME)
    if path is None:
        return [_not_loadable(host, expected)]
    if not rails or mentions_symbol(real_path(host, path), _RAIL_SYMBOL):
        return [ok("neuron.runtime", path, expected)]
    return [
        warn(
            "neuron.runtime",
            f"{path} lacks {_RAIL_SYMBOL}",
            f"{expected}, 2.31 or newer (Neuron SDK 2.29)",
            why="NIXL cannot ask which EFA interface is next to a device and registers KV on every rail: slower",
            fix="`sudo apt-get install -y --only-upgrade aws-neuronx-runtime-lib`",
        )
    ]


def check_engine(host: Host, environment: PythonEnvironment, family: Family | None) -> list[Finding]:
    """Is vLLM there with a plugin that fits it and this hardware?"""
    placeholders = check_placeholders(host, environment, _PLACEHOLDERS, fix=_GET_ENGINE)
    if any(finding.fix for finding in placeholders):
        return placeholders
    vllm, plugin = environment.version("vllm"), environment.version("vllm-neuron")
    if vllm is None or plugin is None:
        return [*placeholders, _no_engine(host, environment, vllm, plugin)]
    line = line_of(plugin)
    if line is None:
        return [*placeholders, _unknown_line(plugin)]
    return [*placeholders, _pairing(line, vllm, plugin), *_hardware(line, plugin, family)]


def check_variables(host: Host) -> list[Finding]:
    """Variables that the plugin sets itself and that must not be inherited."""
    if "NEURON_RT_VISIBLE_CORES" not in host.environ:
        return []
    return [
        warn(
            "environment.visible_cores",
            f"NEURON_RT_VISIBLE_CORES={host.environ['NEURON_RT_VISIBLE_CORES']}",
            "unset; recipes give ranges as NEURON_VISIBLE_DEVICES",
            why="the plugin sets it for each worker; an inherited value puts workers on each other's cores",
            fix="`unset NEURON_RT_VISIBLE_CORES`",
        )
    ]


def _not_loadable(host: Host, expected: str) -> Finding:
    there = host.glob(f"{_RUNTIME_FOLDER}/{_RUNTIME}*")
    if there:
        return fail(
            "neuron.runtime",
            f"{there[0]} is there, but not on the loader path",
            expected,
            why="libfabric then registers no Neuron memory: registration fails later with -FI_ENOSYS",
            fix=f"`echo {_RUNTIME_FOLDER} | sudo tee /etc/ld.so.conf.d/aws-neuron.conf && sudo ldconfig`",
        )
    return fail(
        "neuron.runtime",
        f"no {_RUNTIME} anywhere",
        expected,
        why="the Neuron runtime is what runs models and owns device memory",
        fix="`sudo apt-get install -y aws-neuronx-runtime-lib aws-neuronx-collectives` (Neuron repository)",
    )


def _no_engine(host: Host, environment: PythonEnvironment, vllm: str | None, plugin: str | None) -> Finding:
    ready = host.glob(_DLAMI)
    hint = f"; {ready[0]} of the DLAMI looks right" if ready else ""
    return fail(
        "neuron.engine",
        f"vllm {vllm or 'absent'}, vllm-neuron {plugin or 'absent'} beside {environment.interpreter}{hint}",
        "vllm and vllm-neuron of one line",
        why="engines run in the same environment as kvduplex",
        fix=f"{ready[0]}/bin/pip install kvduplex, then start kvduplex from there" if ready else _GET_ENGINE,
    )


def _unknown_line(plugin: str) -> Finding:
    known = ", ".join(line.name for line in LINES)
    return warn(
        "neuron.engine",
        f"vllm-neuron {plugin}",
        f"a known line: {known}",
        why="nothing is known about which way KV can move with it",
        fix="use a known line, or check the plugin's release notes for NIXL and bidirectional transfer",
    )


def _pairing(line: PluginLine, vllm: str, plugin: str) -> Finding:
    seen = f"vllm {vllm}, vllm-neuron {plugin}"
    expected = f"vllm{line.vllm} with vllm-neuron{line.plugin} (Neuron SDK {line.sdk})"
    if line.vllm.contains(vllm, prereleases=True):
        return ok("neuron.engine", seen, expected)
    why = "the plugin patches the vLLM it was made for and fails, or worse, with another"
    return fail(
        "neuron.engine", seen, expected, why=why, fix=f"`pip install {_INDEX} 'vllm{line.vllm}'`, or use the DLAMI"
    )


def _hardware(line: PluginLine, plugin: str, family: Family | None) -> list[Finding]:
    if family is None:
        return []
    seen = f"vllm-neuron {plugin} on {family}"
    if family not in line.families:
        fitting = next(other for other in LINES if family in other.families)
        return [
            fail(
                "neuron.line",
                seen,
                f"vllm-neuron{fitting.plugin} (Neuron SDK {fitting.sdk}) on {family}",
                why=f"line {line.name} supports {', '.join(sorted(line.families))} only",
                fix=f"use a Neuron DLAMI or container of SDK {fitting.sdk}",
            )
        ]
    if line.direction is Direction.NONE:
        return [
            warn(
                "neuron.line",
                f"{seen}: no KV connector",
                "a line with NIXL: vllm-neuron 0.21 or newer, on trn2 or trn3",
                why="prefill and decode cannot be separated on this line: engines run as plain replicas, and the "
                "router keeps conversations where their prefix is",
                fix="nothing, for replicas (recipe llama-3.1-8b-trn1); for prefill/decode move to trn2 or trn3",
            )
        ]
    leases = "leases" if line.leased else "stock connector only"
    return [ok("neuron.line", f"{seen}: KV moves {line.direction}, {leases}", "KV can move")]
