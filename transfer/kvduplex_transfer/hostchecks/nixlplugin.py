"""NIXL's libfabric plugin: is it there, can everything it links be loaded, and does libfabric define what it asks for?

A plugin that cannot be loaded is only a warning to NIXL; what the engine says later is ``unsupported backend
'LIBFABRIC'`` and ``nixlNotFoundError``. The plugin of the public wheels links ``libcuda.so.1`` and ``libcudart`` even
for Neuron, and names the newest symbol version of the libfabric it was built with (``libfabric.map.in`` of
ofiwg/libfabric): nixl-cu12 1.4.1 asks for FABRIC_1.7, 1.5.1 for FABRIC_1.10, which libfabric 2.7 (EFA installer 1.51)
was first to define.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from kvduplex_transfer.hostchecks.elf import ElfError, SharedLibrary, read_shared_library
from kvduplex_transfer.hostchecks.findings import fail, ok, shorten, warn
from kvduplex_transfer.hostchecks.loader import Loader, real_path
from kvduplex_transfer.hostchecks.pythonenv import PythonEnvironment
from kvduplex_transfer.interface import Finding, Host

__all__ = ["check_nixl_plugin", "plugin_path"]

_FABRIC = "libfabric.so.1"
_CUDA_STUB = (
    "install a driver stub: `apt-get install -y cuda-cudart-dev-12-6`, then `ln -sf "
    "/usr/local/cuda-12.6/targets/x86_64-linux/lib/stubs/libcuda.so /usr/local/lib/libcuda.so.1 && ldconfig`"
)
_FIXES = {
    "libfabric": "install the EFA installer's libfabric and put it on the loader path: "
    "`echo /opt/amazon/efa/lib | sudo tee /etc/ld.so.conf.d/efa.conf && sudo ldconfig`",
    "libcuda": _CUDA_STUB,
    "libcudart": "`sudo apt-get install -y cuda-cudart-12-6` (for nixl-cu13 `cuda-cudart-13-0`), then `sudo ldconfig`",
    "libhwloc": "`sudo apt-get install -y libhwloc15`",
}


def check_nixl_plugin(host: Host, environment: PythonEnvironment, *, cuda_driver: str = _CUDA_STUB) -> list[Finding]:
    """Follow the plugin's links the way the loader would.

    Args:
        host: Machine to read.
        environment: Where engines run.
        cuda_driver: How to get ``libcuda.so.1`` on this kind of host; a stub unless there are GPUs.
    """
    version = environment.version("nixl") or environment.version("nixl-cu12") or environment.version("nixl-cu13")
    if version is None:
        return [_absent(environment)]
    path = plugin_path(host, environment)
    if path is None:
        return [_no_plugin(version)]
    try:
        plugin = read_shared_library(real_path(host, path))
    except (ElfError, OSError) as error:
        return [_damaged(path, str(error))]
    loader = Loader(host, preloaded=_torch_libraries(host, environment))
    found = {name: loader.find(name, search_path=_origins(path, plugin)) for name in plugin.needed}
    findings = [ok("nixl.installed", f"nixl {version}, {path}", "nixl with its LIBFABRIC plugin")]
    findings.append(_links(found, {**_FIXES, "libcuda": cuda_driver}))
    if found.get(_FABRIC):
        findings.append(_versions(host, plugin, found[_FABRIC] or "", version))
    return findings


def plugin_path(host: Host, environment: PythonEnvironment) -> str | None:
    """The LIBFABRIC plugin that `nixl` would load: of the CUDA that torch was built for, else the newest variant."""
    torch_cuda = re.search(r"\+cu(\d\d)", environment.version("torch") or "")
    preferred = (torch_cuda[1],) if torch_cuda else ()
    for variant in (*preferred, "13", "12"):
        found = host.glob(f"{environment.packages}/.nixl_cu{variant}.mesonpy.libs/plugins/libplugin_LIBFABRIC.so")
        if found:
            return found[0]
    return None


def _torch_libraries(host: Host, environment: PythonEnvironment) -> list[str]:
    # A CUDA build of torch maps these when it is imported, before NIXL loads its plugins.
    uses_cuda = "+cu" in (environment.version("torch") or "")
    return host.glob(f"{environment.packages}/nvidia/*/lib") if uses_cuda else []


def _origins(path: str, plugin: SharedLibrary) -> Iterable[str]:
    origin = PurePosixPath(path).parent
    return tuple(_normalised(entry.replace("$ORIGIN", str(origin))) for entry in plugin.search_path)


def _normalised(path: str) -> str:
    parts: list[str] = []
    for part in PurePosixPath(path).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return str(PurePosixPath(*parts))


def _absent(environment: PythonEnvironment) -> Finding:
    return fail(
        "nixl.installed",
        f"no nixl beside {environment.interpreter}",
        "nixl with its LIBFABRIC plugin",
        why="NIXL moves every KV block between engines",
        fix=f"`{environment.interpreter} -m pip install 'nixl==1.4.1'`",
    )


def _no_plugin(version: str) -> Finding:
    return fail(
        "nixl.installed",
        f"nixl {version} without libplugin_LIBFABRIC.so",
        "nixl with its LIBFABRIC plugin",
        why="only this plugin speaks EFA",
        fix="reinstall it for the CUDA of torch: `pip install --force-reinstall nixl-cu12` or `nixl-cu13`",
    )


def _damaged(path: str, error: str) -> Finding:
    return fail(
        "nixl.installed",
        f"{path}: {error}",
        "a loadable plugin",
        why="NIXL only warns about a plugin that it cannot load",
        fix="`pip install --force-reinstall nixl`",
    )


def _links(found: dict[str, str | None], fixes: dict[str, str]) -> Finding:
    missing = [name for name, path in found.items() if path is None]
    expected = f"all {len(found)} libraries of the plugin on the loader path"
    if not missing:
        return ok("nixl.libraries", expected, expected)
    remedies = {fixes.get(name.partition(".so")[0], f"find the package that has {name}") for name in missing}
    return fail(
        "nixl.libraries",
        f"not found: {shorten(missing)}",
        expected,
        why="NIXL cannot load the plugin; engines end with `unsupported backend 'LIBFABRIC'`",
        fix="; ".join(sorted(remedies)),
    )


def _versions(host: Host, plugin: SharedLibrary, fabric: str, nixl: str) -> Finding:
    wanted = plugin.required_versions.get(_FABRIC, frozenset())
    expected = f"{_newest(wanted)} or newer, which nixl {nixl} asks for"
    try:
        provided = read_shared_library(real_path(host, fabric)).provided_versions
    except (ElfError, OSError) as error:
        return warn(
            "nixl.symbols",
            f"{fabric}: {error}",
            expected,
            why="its symbol versions are unknown",
            fix=_FIXES["libfabric"],
        )
    seen = f"{_newest(provided)} in {fabric}"
    if wanted <= provided:
        return ok("nixl.symbols", seen, expected)
    return fail(
        "nixl.symbols",
        seen,
        expected,
        why="the loader refuses the plugin; engines end with `unsupported backend 'LIBFABRIC'`",
        fix="`pip install 'nixl==1.4.1'` (asks for FABRIC_1.7), or install EFA installer 1.51 or newer (libfabric 2.7)",
    )


def _newest(versions: Iterable[str]) -> str:
    numbered = [(tuple(map(int, re.findall(r"\d+", version))), version) for version in versions]
    return max(numbered)[1] if numbered else "no symbol version"
