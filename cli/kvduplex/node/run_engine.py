"""Runs this machine's engine of one role."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from kvduplex.node.drain import complete_hook, engine_busy, mark_draining, terminating
from kvduplex.node.engine import engine_plan_of
from kvduplex.node.errors import AwsError
from kvduplex.node.machine import Machine, stop_event
from kvduplex.node.service import Pace, Service
from kvduplex.node.weights import copy_prefix, model_folder
from kvduplex.supervise.unit import Unit
from kvduplex.units import engine_unit
from kvduplex_transfer.interface import Role

__all__ = ["run_engine"]

_LIFECYCLE_S = 5.0


def run_engine(machine: Machine, role: Role) -> None:
    """Bring the weights, start the engine of `role`, and return after its drain.

    Raises:
        KvduplexError: A setting is wrong, something is missing, or the engine failed.
    """
    config = machine.config
    plan = engine_plan_of(config, role, address=machine.address(), interpreter=machine.manifest.engine_python)
    key = machine.engine_key()
    _bring_weights(machine)
    environment = {**machine.environ, **({"VLLM_API_KEY": key} if key else {})}
    # Not below /run, which systems mount without permission to execute: engines compile helpers there.
    with tempfile.TemporaryDirectory(prefix=f"kvduplex-{role}-") as scratch:
        unit = engine_unit(plan, logs=Path(config.logging.folder), scratch=Path(scratch), cache=machine.cache)
        asyncio.run(_serve(machine, unit, environment, lambda: engine_busy(plan.url)))


def _bring_weights(machine: Machine) -> None:
    config = machine.config
    sources = [(config.compile_cache.source, Path(config.compile_cache.folder))]
    if config.model is not None and not config.model.is_local:
        sources.append((config.model.source, model_folder(config.model)))
    for url, folder in sources:
        if url is not None:
            machine.notifier.status(f"copying {url}")
            machine.notifier.extend(config.engine.start_timeout_s)
            copy_prefix(url, folder, s3=machine.aws().client("s3"), report=machine.report)


async def _serve(
    machine: Machine, unit: Unit, environment: Mapping[str, str], busy: Callable[[], Awaitable[str | None]]
) -> None:
    """One engine under the service loop, ended by a signal or by Auto Scaling."""
    stop, config = stop_event(), machine.config
    pace = Pace(start_s=config.engine.start_timeout_s, drain_s=config.drain.timeout_s)
    service = Service(
        unit,
        environment=environment,
        notifier=machine.notifier,
        pace=pace,
        stop=stop,
        busy=busy,
        clock=time.monotonic,
    )
    watch = asyncio.create_task(_until_taken(machine, stop)) if config.drain.lifecycle_hook else None
    try:
        await service.run()
    finally:
        taken = await _settled(watch)
    if taken is not None:
        complete_hook(config.drain, taken, autoscaling=machine.aws().client("autoscaling"))


async def _until_taken(machine: Machine, stop: asyncio.Event) -> str:
    """Wait until Auto Scaling takes the machine, order its drain, and return the instance's id."""
    await terminating(machine.metadata, every_s=_LIFECYCLE_S)
    instance = machine.metadata.instance_id()
    machine.report(f"Auto Scaling takes {instance}; draining")
    try:
        mark_draining(instance, ec2=machine.aws().client("ec2"))
    except AwsError as error:
        machine.report(f"{error} Draining all the same.")  # routers notice when the engine stops answering
    stop.set()
    return instance


async def _settled(watch: asyncio.Task[str] | None) -> str | None:
    if watch is None:
        return None
    if watch.done():
        return watch.result()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    return None
