"""The loop of a machine's agent: look, decide, tell; and publish metrics once a minute."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvduplex.aws.devices import count_devices, efa_readings
from kvduplex.aws.lifecycle import Action, Phase, Seen, State, step
from kvduplex.aws.metrics import Metric, Reading, data, read
from kvduplex.aws.reporter import Reporter
from kvduplex_transfer.interface import Host

__all__ = ["PUBLISH_S", "Agent", "Services", "fetch"]

PUBLISH_S = 60.0
_MAX_BYTES = 8 * 1024 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What runs on this machine.

    Attributes:
        health: URLs that answer 200 while their service is ready.
        metrics: URLs of Prometheus expositions; those that do not answer are left out.
        start_timeout_s: Longest time from start to readiness.
        fault_after_s: How long a service may be silent before the machine counts as broken.
    """

    health: tuple[str, ...]
    metrics: tuple[str, ...]
    start_timeout_s: float
    fault_after_s: float


def fetch(url: str, *, timeout_s: float = 5.0) -> str | None:
    """Body of a 200 answer from this machine's own services, or None."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        body = answer.read(_MAX_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    else:
        return body if answer.status == http.client.OK else None
    finally:
        connection.close()


class Agent:
    """One machine's agent; `look` is called every few seconds.

    Args:
        services: What runs here.
        host: This machine's devices.
        reporter: Tells AWS.
        target: State the group wants this machine in; None when unknown or outside a group.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        services: Services,
        *,
        host: Host,
        reporter: Reporter,
        target: Callable[[], str | None],
        clock: Callable[[], float],
    ) -> None:
        self._services = services
        self._host = host
        self._reporter = reporter
        self._target = target
        self._clock = clock
        self._state = State.begin(clock())
        self._untold: tuple[Action, ...] = ()
        self._readings: dict[str, dict[Metric, Reading]] = {}
        self._published_s = float("-inf")

    @property
    def phase(self) -> Phase:
        """Where this machine is in its life."""
        return self._state.phase

    def look(self) -> None:
        """Look once, tell what is to be told, and publish metrics when a minute has passed."""
        now_s = self._clock()
        seen = Seen(now_s, self._target(), self._is_ready(), count_devices(self._host))
        self._state, actions = step(
            self._state,
            seen,
            start_timeout_s=self._services.start_timeout_s,
            fault_after_s=self._services.fault_after_s,
        )
        self._untold = tuple(a for a in (*self._untold, *actions) if not self._reporter.tell(a))
        if now_s - self._published_s >= PUBLISH_S:
            self._published_s = now_s
            self._publish()

    def _is_ready(self) -> bool:
        return all(fetch(url) is not None for url in self._services.health)

    def _publish(self) -> None:
        published: set[Metric] = set()
        for place, readings in self._sources():
            fresh = data(readings, self._readings.get(place, {}))
            self._readings[place] = readings
            self._reporter.publish(fresh)
            published |= {datum.metric for datum in fresh}
        _log.debug("published %s", ", ".join(sorted(published)) or "nothing")

    def _sources(self) -> Sequence[tuple[str, dict[Metric, Reading]]]:
        found = [("efa", efa_readings(self._host))]
        for url in self._services.metrics:
            text = fetch(url)
            if text is None:
                continue
            try:
                found.append((url, read(text)))
            except ValueError:
                _log.warning("%s is no Prometheus exposition", url)
        return found
