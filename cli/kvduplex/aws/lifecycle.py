"""What a machine tells its Auto Scaling group between launch and end: a pure step over what it sees.

``starting -> serving``: while starting it keeps its launch hook alive by heartbeats; once every service answers it
completes the hook and signals its stack, which waits for exactly that in a rolling update. While serving it tells its
group when it is broken, once. Draining is the services' own affair, since they know their turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["Action", "Phase", "Seen", "State", "step"]

HEARTBEAT_S = 300.0
"""Time between heartbeats of the launch hook; well under any hook's timeout."""
_LEAVING = frozenset({"Terminated", "Detached", "Standby", "Stopped", "Hibernated"})


class Phase(StrEnum):
    """Where a machine is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"


class Action(StrEnum):
    """What is to be told now."""

    HEARTBEAT = "heartbeat"
    COMPLETE_LAUNCH = "complete_launch"
    SIGNAL_SUCCESS = "signal_success"
    ABANDON_LAUNCH = "abandon_launch"
    SIGNAL_FAILURE = "signal_failure"
    MARK_UNHEALTHY = "mark_unhealthy"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look showed.

    Attributes:
        now_s: Monotonic time.
        target: State the group wants this machine in; None outside a group.
        ready: Whether every service of this machine answers.
        devices: Accelerators and EFA devices that are there.
    """

    now_s: float
    target: str | None
    ready: bool
    devices: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """What a machine remembers between two looks.

    Attributes:
        phase: Where it is.
        since_s: When it got there.
        beat_s: Last heartbeat.
        failing_s: Since when a serving machine has not been ready; None while it is.
        devices: Most devices ever seen.
        is_reported: Whether it told its group that it is broken.
    """

    phase: Phase
    since_s: float
    beat_s: float
    failing_s: float | None = None
    devices: int = 0
    is_reported: bool = False

    @classmethod
    def begin(cls, now_s: float) -> State:
        """A machine that has just come up."""
        return cls(Phase.STARTING, since_s=now_s, beat_s=now_s)


def step(state: State, seen: Seen, *, start_timeout_s: float, fault_after_s: float) -> tuple[State, tuple[Action, ...]]:
    """The next state, and what is to be told, in order.

    Args:
        state: As the last step left it.
        seen: What is so now.
        start_timeout_s: Longest time from start to readiness.
        fault_after_s: How long a machine that was ready may be silent before it counts as broken.
    """
    state = replace(state, devices=max(state.devices, seen.devices))
    if seen.target in _LEAVING:
        return replace(state, phase=Phase.LEAVING), ()
    if state.phase is Phase.STARTING:
        return _starting(state, seen, start_timeout_s)
    if state.phase is Phase.SERVING:
        return _serving(state, seen, fault_after_s)
    return state, ()


def _starting(state: State, seen: Seen, start_timeout_s: float) -> tuple[State, tuple[Action, ...]]:
    if seen.ready:
        serving = replace(state, phase=Phase.SERVING, since_s=seen.now_s)
        return serving, (Action.COMPLETE_LAUNCH, Action.SIGNAL_SUCCESS)
    if seen.now_s - state.since_s >= start_timeout_s:
        return replace(state, phase=Phase.LEAVING), (Action.SIGNAL_FAILURE, Action.ABANDON_LAUNCH)
    if seen.now_s - state.beat_s >= HEARTBEAT_S:
        return replace(state, beat_s=seen.now_s), (Action.HEARTBEAT,)
    return state, ()


def _serving(state: State, seen: Seen, fault_after_s: float) -> tuple[State, tuple[Action, ...]]:
    # A device that is gone does not come back without the machine being replaced; a silent engine may.
    is_lost = seen.devices < state.devices
    failing_s = None if seen.ready else (seen.now_s if state.failing_s is None else state.failing_s)
    is_silent = failing_s is not None and seen.now_s - failing_s >= fault_after_s
    if (is_lost or is_silent) and not state.is_reported:
        return replace(state, failing_s=failing_s, is_reported=True), (Action.MARK_UNHEALTHY,)
    return replace(state, failing_s=failing_s), ()
