"""The engine's ``/metrics``: vLLM's names, and the simulation's own health."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvduplex_bench.sim.core.engine import EngineCore
from kvduplex_bench.sim.http.driver import Driver

__all__ = ["CONTENT_TYPE", "render_metrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(core: EngineCore, driver: Driver, refused: dict[str, int]) -> bytes:
    """Prometheus text.

    Args:
        core: The engine.
        driver: What runs it.
        refused: Claims that ended in recomputation, by reason.
    """
    return ("\n".join(_lines(core, driver, refused)) + "\n").encode()


def _lines(core: EngineCore, driver: Driver, refused: dict[str, int]) -> Iterator[str]:
    timing, counts, scheduler, pool = core.timing, core.counts, core.scheduler, core.pool
    labels = f'engine="0",model_name="{timing.model}"'
    computed = counts.prompt_tokens - counts.local_hits - counts.external
    leases = core.table.snapshot()
    values: list[tuple[str, str, str, float]] = [
        ("gauge", "vllm:num_requests_running", "", scheduler.running),
        ("gauge", "vllm:num_requests_waiting", "", scheduler.waiting),
        ("gauge", "vllm:kv_cache_usage_perc", "", 1 - pool.free / pool.total),
        ("counter", "vllm:prefix_cache_queries_total", "", counts.prompt_tokens),
        ("counter", "vllm:prefix_cache_hits_total", "", counts.local_hits),
        ("counter", "vllm:external_prefix_cache_queries_total", "", counts.prompt_tokens - counts.local_hits),
        ("counter", "vllm:external_prefix_cache_hits_total", "", counts.external),
        ("counter", "vllm:prompt_tokens_total", "", counts.prompt_tokens),
        ("counter", "vllm:prompt_tokens_by_source_total", ',source="local_compute"', computed),
        ("counter", "vllm:prompt_tokens_by_source_total", ',source="local_cache_hit"', counts.local_hits),
        ("counter", "vllm:prompt_tokens_by_source_total", ',source="external_kv_transfer"', counts.external),
        ("counter", "vllm:generation_tokens_total", "", counts.generated),
        ("counter", "vllm:request_success_total", ',finished_reason="length"', counts.finished),
        ("counter", "vllm:request_success_total", ',finished_reason="abort"', counts.aborted),
        ("gauge", "vllm:cache_config_info", f',block_size="{timing.block_size}",num_gpu_blocks="{pool.total}"', 1),
        ("gauge", "kvduplex_lease_held", "", leases.held),
        ("gauge", "kvduplex_lease_claimed", "", leases.claimed),
        ("gauge", "kvduplex_lease_blocks_pinned", "", leases.blocks_pinned),
        ("gauge", "kvduplex_sim_kept_for_readers", "", core.kept_for_readers),
        ("counter", "kvduplex_sim_busy_seconds_total", "", counts.busy_s),
        ("gauge", "kvduplex_sim_lag_seconds", "", driver.lag_s),
        ("counter", "kvduplex_sim_late_seconds_total", "", driver.late_s),
        ("counter", "kvduplex_sim_steps_total", "", driver.steps),
    ]
    values += [
        ("counter", "kvduplex_lease_refused_total", f',reason="{reason}"', count) for reason, count in refused.items()
    ]
    said = ""
    for kind, name, more, value in values:
        if name != said:
            yield f"# TYPE {name} {kind}"
            said = name
        yield f"{name}{{{labels}{more}}} {value:g}" if value < 1e6 else f"{name}{{{labels}{more}}} {value!r}"  # noqa: PLR2004
