"""From options to the clusters of a run and their arms."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Final

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn import stage as stages
from kvduplex_bench.multiturn.campaign import Act
from kvduplex_bench.multiturn.engines import Engines
from kvduplex_bench.multiturn.target import Target
from kvduplex_bench.multiturn.wire import Origin
from kvduplex_bench.multiturn.workload import Arm, Workload

__all__ = [
    "arms_named", "cpu_stage", "found_act", "must_be_alone", "names", "numbers", "own_acts", "routers_of", "setting_of",
    "urls",
]  # fmt: skip

_MAX_MODEL_LEN: Final = 32_768


def arms_named(text: str) -> list[Arm] | None:
    """Arms by name, with commas; None for an empty text.

    Raises:
        BenchError: One is unknown.
    """
    given = names(text)
    if unknown := [name for name in given if name not in set(Arm)]:
        raise BenchError(f"--arms {text}: {unknown[0]} is unknown; choose from {', '.join(Arm)}")
    return [Arm(name) for name in given] or None


def own_acts(settings: Sequence[stages.Setting], wanted: Sequence[Arm] | None, stage: stages.CpuStage) -> list[Act]:
    """One cluster of ours a setting.

    Raises:
        BenchError: A setting can play none of the wanted arms.
    """

    def act(setting: stages.Setting) -> Act:
        arms = setting.arms(wanted or [Arm.OFF, Arm.ON, Arm.FLOOR])
        if not arms:
            raise BenchError(f"--arms floor: {setting.name} has no cache to fill; add --prefill-cache on")
        return Act(setting.name, arms, lambda: stages.staged(stage, setting, arms), own=True)

    return [act(setting) for setting in settings]


def cpu_stage(workload: Workload, size: str, kv_gib: float, cores: int) -> stages.CpuStage:
    """What the clusters of a run have in common; generates the model.

    Raises:
        BenchError: The workload does not fit, or the model cannot be made.
    """
    workload.must_fit(_MAX_MODEL_LEN)
    available = len(os.sched_getaffinity(0))
    return stages.CpuStage(stages.generated_model(size), _MAX_MODEL_LEN, kv_gib, min(cores, available))


def found_act(
    setting: str,
    wanted: Sequence[Arm] | None,
    routers: Mapping[Arm, str],
    engines: Engines,
    reference: str,
    *,
    fresh_ids: bool,
) -> Act:
    """A cluster that runs already; without a name for its setting it is named after what its engines say.

    Raises:
        BenchError: An arm has no router, or an engine does not answer.
    """
    arms = list(wanted or [arm for arm in (Arm.OFF, Arm.ON, Arm.CONTINUE) if arm in routers])
    if Arm.CONTINUE in arms and Arm.CONTINUE not in routers:
        raise BenchError("--arms continue: needs --continue-url, a router whose plan for a further turn is continue")
    target = Target(setting or _name(engines), routers, engines, reference=reference or None, fresh_ids=fresh_ids)
    about = {"prefill": list(engines.prefill), "decode": list(engines.decode), "routers": {**routers}}
    return Act(target.setting, arms, lambda: nullcontext((target, about)))


def _name(engines: Engines) -> str:
    cache = asyncio.run(engines.prefill_cache()) if engines.known else None
    return "cluster" if cache is None else f"cluster, prefill cache {'on' if cache else 'off'}"


def routers_of(url: str, off_url: str, continue_url: str) -> dict[Arm, str]:
    """A router for each arm.

    Raises:
        BenchError: There is none, or one has no proper URL.
    """
    if not url:
        raise BenchError("give --url of a running router, or --serve cpu to start everything here")
    (on,), off, going_on = urls("--url", [url]), urls("--off-url", [off_url]), urls("--continue-url", [continue_url])
    routers = {Arm.ON: on, Arm.OFF: off[0] if off else on, Arm.FLOOR: off[0] if off else on}
    return routers | ({Arm.CONTINUE: going_on[0]} if going_on else {})


def urls(option: str, given: Sequence[str] | None) -> list[str]:
    """Base URLs given with `option`, checked; empty ones left out.

    Raises:
        BenchError: One is no URL.
    """
    return [Origin.parse(url, option=option).url for url in given or () if url]


def setting_of(connector: str, cache: str) -> stages.Setting:
    """A setting by the names of its parts.

    Raises:
        BenchError: One is unknown.
    """
    if connector not in {"leased", "stock"}:
        raise BenchError(f"--connector {connector}: choose leased, stock, or both with a comma")
    if cache not in {"on", "off"}:
        raise BenchError(f"--prefill-cache {cache}: choose off, on, or both with a comma")
    return stages.Setting(connector, cache == "on")


def must_be_alone(option: str, *others: object) -> None:
    """Refuse `option` together with any of the others.

    Raises:
        BenchError: One of them was given.
    """
    if any(others):
        raise BenchError(f"{option} starts its own cluster; leave --url, --prefill and the like out")


def names(text: str) -> list[str]:
    """Parts of a text with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> tuple[int, ...]:
    """Lengths of prefixes, with commas; empty for an empty text.

    Raises:
        BenchError: One is no number.
    """
    try:
        return tuple(int(part) for part in names(text))
    except ValueError as error:
        raise BenchError(f"--prefixes {text}: write numbers of tokens with commas, e.g. 2000,8000,24000") from error
