"""What this process really opened: the proof behind "over EFA" and "with CUDA"."""

from __future__ import annotations

from pathlib import Path

from kvduplex_transfer.errors import SilentFallbackError

__all__ = ["mapped_libraries", "open_rails", "refuse_without_cuda", "refuse_without_rails"]

_VERBS = "/dev/infiniband/uverbs"


def open_rails(process: Path = Path("/proc/self")) -> int:
    """RDMA devices this process holds open; libibverbs keeps one descriptor of each device it uses."""
    targets = {_target(entry) for entry in (process / "fd").iterdir()}
    return sum(target.startswith(_VERBS) for target in targets)


def mapped_libraries(process: Path = Path("/proc/self")) -> frozenset[str]:
    """File names of the shared libraries this process has mapped."""
    paths = (line.rsplit("/", 1) for line in (process / "maps").read_text().splitlines() if ".so" in line)
    return frozenset(parts[-1] for parts in paths)


def refuse_without_rails(agent: str, *, process: Path = Path("/proc/self")) -> None:
    """Refuse an agent whose libfabric chose a provider without RDMA devices.

    Raises:
        SilentFallbackError: No RDMA device is open: transfers would run over TCP.
    """
    if open_rails(process) == 0:
        raise SilentFallbackError(
            f"agent {agent!r}: LIBFABRIC came up, but no {_VERBS}N is open, so it chose a provider other than efa; "
            "set FI_PROVIDER=efa, check `fi_info -p efa`, and run `kvduplex doctor`"
        )


def refuse_without_cuda(agent: str, *, process: Path = Path("/proc/self")) -> None:
    """Refuse an agent whose UCX claims GPU memory without being able to reach it.

    NIXL's UCX plugin (1.5.1) lists VRAM on hosts without any GPU.

    Raises:
        SilentFallbackError: UCX's CUDA transport is not loaded.
    """
    if not any(name.startswith("libuct_cuda") for name in mapped_libraries(process)):
        raise SilentFallbackError(
            f"agent {agent!r}: UCX came up without its CUDA transport (libuct_cuda), so it cannot reach GPU memory; "
            "check that libcuda.so.1 is the driver's (`ldconfig -p | grep libcuda`), and run `kvduplex doctor`"
        )


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:  # closed meanwhile, as the descriptor of the listing itself is
        return ""
