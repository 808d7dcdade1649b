"""Reads Prometheus metrics of engines and router, and takes differences between two readings."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvduplex_bench.errors import UnreachableError

__all__ = ["Reading", "scrape"]

_Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Reading:
    """Every sample of one ``/metrics`` page, by sample name and labels."""

    samples: Mapping[_Key, float]

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples called `name` that carry all of `labels`; 0 when there is none."""
        wanted = set(labels.items())
        return sum(value for (sample, found), value in self.samples.items() if sample == name and wanted <= found)

    def since(self, earlier: Reading) -> Reading:
        """What was added since an `earlier` reading of the same process; samples that were not there count from 0."""
        return Reading({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})


def parse(text: str) -> Reading:
    """Read the text of a metrics page."""
    families = text_string_to_metric_families(text)
    return Reading({(s.name, frozenset(s.labels.items())): float(s.value) for f in families for s in f.samples})


def scrape(url: str, timeout_s: float = 10.0) -> Reading:
    """Fetch ``<url>/metrics``.

    Raises:
        UnreachableError: The page could not be fetched within `timeout_s`.
    """
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as reply:  # noqa: S310 - the operator's own URL
            return parse(reply.read().decode())
    except (urllib.error.URLError, OSError) as error:
        raise UnreachableError(
            f"{url}/metrics could not be read ({error}); is the engine or router running?"
        ) from error
