"""The hit-rate doctor tells causes apart, and names places without text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.requests.body import Body
from kvduplex_router.telemetry.hits import Cause, HitDoctor, combined, diagnoses, troubles
from kvduplex_router.telemetry.structure import Place, PromptWatch, first_difference, usual


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def body(*messages: Any, **more: Any) -> Body:
    return Body.parse(json.dumps({"model": "m", "messages": list(messages), **more}).encode())


def said(text: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def differs(*bodies: Body) -> Any:
    watch = PromptWatch()
    for each in bodies:
        watch.look("chat", "t", "messages", each)
    return usual(watch.places("chat"))


def test_the_first_message_and_character_that_differ_are_named() -> None:
    stamped = [body(said(f"It is 12:3{i} now. You are kind.", "system"), said("hi")) for i in range(4)]
    assert differs(*stamped) == (Place("messages", 0, 10, in_text=True), 1.0)
    asked = [body(said("You are kind.", "system"), said(text)) for text in ("one", "two", "three")]
    assert differs(*asked) == (Place("messages", 1, 0, in_text=True), 1.0)


def test_what_stands_in_front_of_messages_counts_first() -> None:
    tools = [body(said("a"), tools=[{"type": "function", "n": n}]) for n in (1, 2)]
    place, _ = differs(*tools)
    assert (place.member, place.message, place.in_text) == ("tools", None, False)
    assert json.dumps([{"type": "function", "n": 1}])[place.character] == "1"


def test_other_content_than_text_is_counted_in_its_json() -> None:
    images = [body(said([{"type": "image_url", "image_url": {"url": f"data:{n}"}}])) for n in "ab"]
    place, _ = differs(*images)
    assert (place.message, place.in_text) == (0, False)


def test_a_conversation_that_goes_on_is_no_difference() -> None:
    assert differs(body(said("a")), body(said("a"), said("b", "assistant"), said("c")), body(said("a"))) is None


def test_tenants_are_not_compared_and_the_earliest_place_counts() -> None:
    watch = PromptWatch()
    for tenant, text in (("x", "secret of x"), ("y", "secret of y"), ("x", "secret of z"), ("y", "sec")):
        watch.look("chat", tenant, "messages", body(said(text)))
    assert usual(watch.places("chat")) == (Place("messages", 0, 3, in_text=True), 1.0)


@given(st.text(), st.text(), st.text())
def test_first_difference_is_the_naive_one(start: str, one: str, other: str) -> None:
    a, b = start + one, start + other
    naive = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
    assert first_difference(a, b) == naive


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_may_be_looked_at(parts: list[bytes]) -> None:
    watch = PromptWatch()
    for part in parts:
        watch.look("c", "t", "messages", Body({"messages": part, "tools": part}, len(part)))
    usual(watch.places("c"))


# -- the diagnosis ----------------------------------------------------------------------------------------------


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def doctor(time: Time) -> HitDoctor:
    return HitDoctor(time)


def healthy_hour(doctor: HitDoctor, time: Time) -> None:
    """9 of 10 tokens cached, and found where they were expected."""
    for _ in range(60):
        doctor.counted("chat", 1000, 900, (900, 900))
        doctor.refused("chat", "expired")
        time.now += 30
    time.now += 300


def diagnosed(*doctors: HitDoctor, **usages: float) -> Any:
    (found,) = diagnoses(combined(doctor.told() for doctor in doctors), usages)
    return found


def test_all_is_well(doctor: HitDoctor, time: Time) -> None:
    healthy_hour(doctor, time)
    assert diagnosed(doctor).cause is Cause.UNKNOWN, "nothing was counted lately"
    doctor.counted("chat", 5000, 4400, (4400, 4400))
    assert (diagnosed(doctor).cause, diagnosed(doctor).fallen) == (Cause.NOTHING, False)


def test_evicted_tokens_are_memory_pressure(doctor: HitDoctor, time: Time) -> None:
    healthy_hour(doctor, time)
    doctor.counted("chat", 5000, 1000, (4500, 4500))
    found = diagnosed(doctor, d0=0.97, d1=0.5)
    assert (found.cause, found.fallen, found.rate, found.baseline) == (Cause.MEMORY_PRESSURE, True, 0.2, 0.9)
    assert found.shares["memory"] == 0.7
    assert "d0 use 90% of their KV cache or more" in found.because
    assert "d1" not in found.because


def test_tokens_held_elsewhere_are_routing(doctor: HitDoctor, time: Time) -> None:
    healthy_hour(doctor, time)
    doctor.counted("chat", 5000, 500, (500, 4500))
    found = diagnosed(doctor)
    assert found.cause is Cause.ROUTING
    assert "80% of prompt tokens were held by another engine" in found.because


def test_tokens_that_nobody_held_are_the_prompts_structure(doctor: HitDoctor, time: Time) -> None:
    healthy_hour(doctor, time)
    for i in range(3):
        doctor.counted("chat", 5000, 100, (100, 100))
        doctor.prompts.look("chat", "t", "messages", body(said(f"Today is day {i} of May", "system")))
    found = diagnosed(doctor)
    assert found.cause is Cause.PROMPT_STRUCTURE
    assert "100% of the prompts compared start to differ at messages[0], character 13" in found.because
    assert "May" not in found.because


def test_without_knowledge_of_engines_the_refusals_speak(doctor: HitDoctor) -> None:
    doctor.counted("chat", 5000, 100, None)
    assert diagnosed(doctor).cause is Cause.UNKNOWN
    for reason, times in (("expired", 1), ("history_changed", 5), ("first_turn", 50)):
        for _ in range(times):
            doctor.refused("chat", reason)
    assert diagnosed(doctor).cause is Cause.PROMPT_STRUCTURE


def test_what_several_processes_saw_is_judged_together(time: Time) -> None:
    """One that is told little of would say that nothing is known, and one that sees luck that nothing is wrong."""
    one, other = HitDoctor(time), HitDoctor(time)
    for doctor in (one, other):
        healthy_hour(doctor, time)
    one.counted("chat", 1500, 1200, (1200, 1200))
    other.counted("chat", 6000, 300, (5400, 5400))
    other.prompts.look("chat", "t", "messages", body(said("It is one", "system")))
    other.prompts.look("chat", "t", "messages", body(said("It is two", "system")))
    assert diagnosed(one).cause is Cause.UNKNOWN
    found = diagnosed(one, other)
    assert (found.cause, found.rate, found.baseline) == (Cause.MEMORY_PRESSURE, 0.2, 0.9)
    assert found.as_builtins()["differs_at"]["character"] == 6
    one.counted("rag", 100, 0, None)
    assert [each.workload for each in combined([one.told(), other.told()])] == ["chat", "rag"]
    assert list(troubles(diagnoses(combined([one.told(), other.told()]), {}))) == ["chat"]


def test_memory_is_bounded(doctor: HitDoctor, time: Time) -> None:
    for number in range(200):
        doctor.counted(f"class{number}", 10, 5, None)
    for _ in range(500):
        doctor.counted("class0", 10, 5, None)
        time.now += 60
    assert len(doctor._buckets) == 64
    assert max(map(len, doctor._buckets.values())) <= 130


# -- through a router -------------------------------------------------------------------------------------------


async def test_the_router_says_where_prompts_differ_and_never_what_they_say(
    make_cluster: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADMIN_KEY", "admin-secret")
    classes = [{"name": "rag"}]
    router = await make_cluster(
        prefill=0, decode=0, engines=1, admin={"key_env": "ADMIN_KEY"}, routing={"policy": "prefix", "classes": classes}
    )
    answer = router.replicas[0].handler

    async def long_prompts(request: Any) -> None:
        router.replicas[0].usage = lambda _completion=1: {
            "prompt_tokens": 1000, "completion_tokens": 1, "total_tokens": 1001,
            "prompt_tokens_details": {"cached_tokens": 10},
        }  # fmt: skip
        await answer(request)

    router.replicas[0].handler = long_prompts
    monkeypatch.setattr(HitDoctor, "looks", True)
    for number in range(6):
        system = f"Session {number}. " + "The handbook says a lot of things. " * 60
        messages = [said(system, "system"), said("hello")]
        await router.client.chat({"messages": messages}, {"x-kvduplex-class": "rag"})
    told = await router.client("/admin/hit-rate", None, {"authorization": "Bearer admin-secret"})
    (found,) = told.json["classes"]
    assert (found["workload"], found["cause"]) == ("rag", "prompt_structure")
    assert found["differs_at"] == {
        "member": "messages", "message": 0, "character": 8, "in_text": True, "share": 1.0,
    }  # fmt: skip
    assert "handbook" not in told.body.decode()
    assert router.metric("prompt_tokens_total", **{"class": "rag"}) == 6000
    assert router.metric("lost_tokens_total", **{"class": "rag", "cause": "new"}) > 5000
