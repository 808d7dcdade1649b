"""Environment variables that decide, or quietly spoil, transfers over EFA.

Sources: libfabric's ``fi_efa(7)``; the vLLM Neuron disaggregated inference tutorial (shared memory transfer and wrong
output on one node); vLLM's ``envs.py`` and ``nixl/base_scheduler.py`` (the side channel host is what peers dial).
"""

from __future__ import annotations

from kvduplex_transfer.engine_options import WILDCARD_HOSTS
from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.hostchecks.identity import kernel_version
from kvduplex_transfer.interface import Finding, Host

__all__ = ["check_fabric_variables", "check_side_channel"]

_FORK_SAFE_KERNEL = (5, 15)
_LOOPBACK = ("127.", "localhost", "::1")


def check_fabric_variables(host: Host) -> list[Finding]:
    """Variables of libfabric and the EFA provider in the environment that engines inherit."""
    found = [check(host) for check in (_provider, _peer_to_peer, _fork_safety)]
    findings = [finding for finding in found if finding is not None]
    return findings or [ok("environment.fabric", "nothing that harms", "FI_PROVIDER unset or efa, p2p left on")]


def check_side_channel(host: Host, *, single_host: bool = False) -> list[Finding]:
    """The address that an engine of this host would give to its peers.

    Args:
        host: Machine to read.
        single_host: Whether prefill and decode share this host, so that a loopback address is right.
    """
    address = host.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
    expected = "an address of this host that its peers reach"
    if address is None:
        return [ok("environment.side_channel", "unset; recipes set it", expected)]
    if address in WILDCARD_HOSTS:
        return [
            fail(
                "environment.side_channel",
                f"VLLM_NIXL_SIDE_CHANNEL_HOST={address}",
                expected,
                why="vLLM hands this address to peers as it is: each dials itself, and requests stall after prefill",
                fix="unset it and give `--advertise ADDRESS`, or set this host's private address (`hostname -I`)",
            )
        ]
    if address.startswith(_LOOPBACK) and not single_host:
        return [
            warn(
                "environment.side_channel",
                f"VLLM_NIXL_SIDE_CHANNEL_HOST={address}",
                expected,
                why="engines on other hosts would dial themselves",
                fix="unset it, or set this host's private address (`hostname -I`), unless both roles run here",
            )
        ]
    return [ok("environment.side_channel", address, expected)]


def _provider(host: Host) -> Finding | None:
    value = host.environ.get("FI_PROVIDER")
    if value is None or "efa" in value.split(","):
        return None
    return fail(
        "environment.fi_provider",
        f"FI_PROVIDER={value}",
        "unset, or efa",
        why="libfabric is told not to use EFA: transfers would run over TCP, and device memory be refused",
        fix="`unset FI_PROVIDER`",
    )


def _peer_to_peer(host: Host) -> Finding | None:
    value = host.environ.get("FI_HMEM_DISABLE_P2P", "0").lower()
    if value in {"", "0", "false", "no"}:
        return None
    return fail(
        "environment.fi_hmem_disable_p2p",
        f"FI_HMEM_DISABLE_P2P={value}",
        "unset",
        why="it forbids the NIC to reach device memory, so registration of KV blocks fails",
        fix="`unset FI_HMEM_DISABLE_P2P`",
    )


def _fork_safety(host: Host) -> Finding | None:
    kernel = kernel_version(host)
    if "RDMAV_FORK_SAFE" in host.environ:
        name = "RDMAV_FORK_SAFE"
    elif "FI_EFA_FORK_SAFE" in host.environ and kernel is not None and kernel >= _FORK_SAFE_KERNEL:
        name = "FI_EFA_FORK_SAFE"
    else:
        return None
    return warn(
        "environment.fork_safe",
        f"{name}={host.environ[name]}",
        f"unset on kernel {'.'.join(map(str, _FORK_SAFE_KERNEL))} or newer",
        why="it marks every registered page as not inherited by children, which slows registration and may fail with "
        "huge pages; newer kernels copy pinned pages on fork",
        fix=f"`unset {name}`",
    )
