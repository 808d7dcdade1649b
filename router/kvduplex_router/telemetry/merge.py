"""One exposition out of those of several processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["merged"]

_STATES: Final = frozenset(
    f"kvduplex_router_{name}"
    for name in (
        "engine_up", "breaker_open", "engine_shut", "engine_incompatible", "engine_running", "engine_waiting",
        "engine_kv_usage", "discovery_failing", "events_trusted", "index_blocks", "prefill_token_seconds",
    )
)  # fmt: skip
"""Facts about an engine rather than amounts of this process: the largest counts, not the sum."""


def merged(expositions: Iterable[bytes]) -> bytes:
    """Add samples of the same name and labels up; of `_STATES` take the largest."""
    heads: dict[str, tuple[str, str]] = {}
    samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for exposition in expositions:
        for family in text_string_to_metric_families(exposition.decode()):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            heads[name] = (family.documentation, family.type)
            into = samples.setdefault(name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                known = into.get(key, 0.0)
                into[key] = max(known, sample.value) if name in _STATES else known + sample.value
    lines: list[str] = []
    for name, (documentation, kind) in heads.items():
        lines += [f"# HELP {name} {documentation}", f"# TYPE {name} {kind}"]
        lines += [f"{sample}{_labels(labels)} {value}" for (sample, labels), value in samples[name].items()]
    return ("\n".join(lines) + "\n").encode()


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
