"""What a machine tells its group: ready once, broken once, and nothing while it leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvduplex.aws.lifecycle import HEARTBEAT_S, Action, Phase, Seen, State, step

START_S, FAULT_S = 3600.0, 300.0


def run(*seen: Seen, state: State | None = None) -> tuple[State, list[Action]]:
    """Take several steps and gather what was told."""
    state = state or State.begin(0.0)
    told: list[Action] = []
    for one in seen:
        state, actions = step(state, one, start_timeout_s=START_S, fault_after_s=FAULT_S)
        told += actions
    return state, told


def look(now_s: float, *, ready: bool, target: str | None = "InService", devices: int = 16) -> Seen:
    return Seen(now_s, target, ready, devices)


def test_a_ready_machine_completes_its_hook_and_signals_once() -> None:
    state, told = run(look(5, ready=True), look(10, ready=True), look(15, ready=True))
    assert state.phase is Phase.SERVING
    assert told == [Action.COMPLETE_LAUNCH, Action.SIGNAL_SUCCESS]


def test_a_starting_machine_keeps_its_hook_alive() -> None:
    _, told = run(*(look(t, ready=False) for t in range(0, int(4 * HEARTBEAT_S), 5)))
    assert told == [Action.HEARTBEAT] * 3


def test_a_machine_that_never_gets_ready_fails_the_update_and_gives_up() -> None:
    state, told = run(look(START_S, ready=False), look(START_S + 5, ready=True))
    assert state.phase is Phase.LEAVING
    assert told == [Action.SIGNAL_FAILURE, Action.ABANDON_LAUNCH]


def test_a_lost_device_is_told_at_once_and_once() -> None:
    _, told = run(look(5, ready=True), look(10, ready=True, devices=15), look(15, ready=True, devices=15))
    assert told[2:] == [Action.MARK_UNHEALTHY]


def test_a_silent_engine_is_told_after_its_time() -> None:
    silent = [look(10 + t, ready=False) for t in (0, FAULT_S - 1, FAULT_S, FAULT_S + 5)]
    _, told = run(look(5, ready=True), *silent)
    assert told[2:] == [Action.MARK_UNHEALTHY]


def test_an_engine_that_restarts_in_time_is_not_told() -> None:
    _, told = run(
        look(5, ready=True),
        look(10, ready=False),
        look(10 + FAULT_S - 1, ready=True),
        look(10 + FAULT_S, ready=False),
        look(10 + 2 * FAULT_S - 1, ready=False),
    )
    assert told[2:] == []


def test_a_leaving_machine_says_nothing() -> None:
    state, told = run(look(5, ready=True), look(10, ready=False, target="Terminated"), look(9999, ready=False))
    assert state.phase is Phase.LEAVING
    assert told[2:] == []


@given(st.lists(st.tuples(st.floats(0, 400), st.booleans(), st.integers(0, 16)), max_size=60))
def test_success_and_faults_are_told_at_most_once(looks: list[tuple[float, bool, int]]) -> None:
    now = 0.0
    seen = []
    for gap, ready, devices in looks:
        now += gap
        seen.append(look(now, ready=ready, devices=devices))
    _, told = run(*seen)
    for action in (Action.COMPLETE_LAUNCH, Action.SIGNAL_SUCCESS, Action.MARK_UNHEALTHY, Action.ABANDON_LAUNCH):
        assert told.count(action) <= 1
    assert not {Action.COMPLETE_LAUNCH, Action.ABANDON_LAUNCH} <= set(told)
