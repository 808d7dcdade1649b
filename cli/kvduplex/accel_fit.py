"""Whether a recipe fits the host it is to start on: instance type, devices, versions, weights, writable folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvduplex.accel_cluster import AccelPlan
from kvduplex.preflight import model_findings
from kvduplex_gpu.options import GpuOptions
from kvduplex_neuron.options import NeuronOptions
from kvduplex_transfer.hostchecks.findings import fail
from kvduplex_transfer.interface import Finding
from kvduplex_transfer.recipes import Recipe

__all__ = ["fit_findings"]

_FACT_OF = {"vllm": "vllm", "vllm-neuron": "vllm_neuron", "nixl": "nixl"}
_DEVICES = {"neuron": ("logical_cores", "logical NeuronCores"), "gpu": ("gpus", "GPUs")}


def fit_findings(plan: AccelPlan, facts: Mapping[str, str], *, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that keeps `plan` from running here; nothing when it fits.

    Args:
        plan: What is to run.
        facts: Facts of the host's report.
        environ: What engines inherit; it names the default compile cache.
    """
    yield from _instance(plan.recipe, facts.get("instance_type"))
    yield from _devices(plan, facts)
    yield from _versions(plan.recipe, facts)
    yield from model_findings(plan.recipe.model)
    yield from _folders(plan, environ)


def _instance(recipe: Recipe, actual: str | None) -> Iterator[Finding]:
    wanted = recipe.hosts.instance_types
    if actual is None or not wanted or actual in wanted:
        return
    yield fail(
        "recipe.instance",
        actual,
        f"{' or '.join(wanted)}, for recipe {recipe.name}",
        why="parallelism and core ranges of the recipe are those of another host",
        fix=f"choose a recipe for {actual}, or copy this one to a file and adapt it: `--recipe mine.yaml`",
    )


def _devices(plan: AccelPlan, facts: Mapping[str, str]) -> Iterator[Finding]:
    fact, what = _DEVICES[plan.recipe.backend]
    available = int(facts.get(fact, "0"))
    taken = _taken(plan)
    if not available or not taken:
        return  # the doctor has said that devices are missing, or the recipe leaves the choice to the engine
    needed = max(taken) + 1
    if needed > available or len(taken) > len(set(taken)):
        yield fail(
            "recipe.devices",
            f"{available} {what}",
            f"{needed} {what} for {' and '.join(plan.roles)}, none shared",
            why="engines would find their devices missing or taken",
            fix="start one role on each host with --role, or change engines, first_core or ranks by --set",
        )


def _taken(plan: AccelPlan) -> list[int]:
    taken: list[int] = []
    for role in plan.roles:
        settings, where = plan.recipe.options(role), f"recipe {plan.recipe.name}, {role}"
        if plan.recipe.backend == "neuron":
            neuron = NeuronOptions.parse(settings, where=where)
            ranges = [neuron.cores(index) for index in range(neuron.engines)]
            taken += [core for first, last in ranges for core in range(first, last + 1)]
        else:
            gpu = GpuOptions.parse(settings, where=where)
            shared = gpu.gpu_memory_utilization is not None and gpu.gpu_memory_utilization <= 0.5  # noqa: PLR2004
            devices = [gpu.devices(index) or tuple(range(gpu.ranks)) for index in range(gpu.engines)]
            taken += [device for one in devices for device in one if not (shared and device in taken)]
    return taken


def _versions(recipe: Recipe, facts: Mapping[str, str]) -> Iterator[Finding]:
    for name, wanted in recipe.stack.requirements().items():
        actual = facts.get(_FACT_OF[name])
        if actual is not None and not wanted.contains(actual, prereleases=True):
            yield fail(
                f"recipe.{name.replace('-', '_')}",
                f"{name} {actual}",
                f"{name}{wanted}, for recipe {recipe.name}",
                why="the recipe's settings are those of another version, and peers must run the same one",
                fix=f"`pip install '{name}{wanted}'` here, or choose a recipe for {name} {actual}",
            )


def _folders(plan: AccelPlan, environ: Mapping[str, str]) -> Iterator[Finding]:
    for role in plan.roles:
        settings = plan.recipe.options(role)
        chosen = {"cache_dir": settings.get("cache_dir"), "download_dir": settings.get("download_dir")}
        if plan.recipe.backend == "neuron" and chosen["cache_dir"] is None:
            chosen["cache_dir"] = environ.get("VLLM_CACHE_ROOT", f"{environ.get('HOME', '/root')}/.cache/vllm")
        for name, folder in chosen.items():
            if folder is not None and not _writable(Path(str(folder))):
                yield fail(
                    f"recipe.{name}",
                    f"{folder} cannot be written by this user",
                    "a folder that this user can write",
                    why="compiled graphs and weights go there; without them every start compiles or downloads anew",
                    fix=f"`sudo install -d -o $USER {folder}`, or `--set {name}=/another/folder`",
                )


def _writable(folder: Path) -> bool:
    # `Path.exists` raises below a folder that this user may not enter; seen from here, that folder is the last one.
    existing = next((path for path in (folder, *folder.parents) if os.access(path, os.F_OK)), None)
    return existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
