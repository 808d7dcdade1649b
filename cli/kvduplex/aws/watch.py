"""The loop of a machine's agent: look, decide, tell; and publish metrics once a minute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvduplex.aws.devices import count_devices
from kvduplex.aws.lifecycle import Action, Phase, Seen, State, step
from kvduplex.aws.publisher import Publisher, fetch
from kvduplex.aws.reporter import Reporter
from kvduplex_transfer.interface import Host

__all__ = ["Agent", "Services"]


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
        self._publisher = Publisher(services.metrics, host=host, publish=reporter.publish, clock=clock)

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
        self._publisher.look()

    def _is_ready(self) -> bool:
        return all(fetch(url) is not None for url in self._services.health)
