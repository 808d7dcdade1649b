"""Metrics of the services on this machine, read once a minute and handed to CloudWatch."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from kvduplex.aws.devices import efa_readings
from kvduplex.aws.metrics import Datum, Metric, Reading, data, read
from kvduplex_transfer.interface import Host

__all__ = ["PUBLISH_S", "Publisher", "fetch"]

PUBLISH_S = 60.0
_MAX_BYTES = 8 * 1024 * 1024
_log = logging.getLogger(__name__)


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


class Publisher:
    """Reads and publishes when a minute has passed; `look` is called every few seconds.

    Args:
        urls: Prometheus expositions; those that do not answer are left out.
        host: This machine's devices.
        publish: Takes what is to be published.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        host: Host,
        publish: Callable[[Sequence[Datum]], object],
        clock: Callable[[], float],
    ) -> None:
        self._urls = urls
        self._host = host
        self._publish_data = publish
        self._clock = clock
        self._readings: dict[str, dict[Metric, Reading]] = {}
        self._published_s = float("-inf")

    def look(self) -> None:
        """Publish, if it is time to."""
        now_s = self._clock()
        if now_s - self._published_s >= PUBLISH_S:
            self._published_s = now_s
            self._publish()

    def _publish(self) -> None:
        published: set[Metric] = set()
        for place, readings in self._sources():
            fresh = data(readings, self._readings.get(place, {}))
            self._readings[place] = readings
            self._publish_data(fresh)
            published |= {datum.metric for datum in fresh}
        _log.debug("published %s", ", ".join(sorted(published)) or "nothing")

    def _sources(self) -> Sequence[tuple[str, dict[Metric, Reading]]]:
        found = [("efa", efa_readings(self._host))]
        for url in self._urls:
            text = fetch(url)
            if text is None:
                continue
            try:
                found.append((url, read(text)))
            except ValueError:
                _log.warning("%s is no Prometheus exposition", url)
        return found
