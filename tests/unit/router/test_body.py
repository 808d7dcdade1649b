"""Bodies kept as bytes: what is read, what is sent on, and that nothing below the top level changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.errors import BadRequestError, RouterError
from kvduplex_router.pd.shape import decode_body, prefill_body, whole_body
from kvduplex_router.requests.apis import ALL, CHAT, MESSAGES, RESPONSES
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.fields import OWNED

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.text(max_size=10) | st.sampled_from(
    ["kv_transfer_params", "conversation_id", "vllm_xargs", "max_tokens", "stream"]
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=8)


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]))
def test_rendering_changes_nothing_but_what_it_is_told(value: dict[str, Any], ascii_only: bool, indent: Any) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    try:
        body = Body.parse(raw)
    except RouterError:
        assert any("\ud800" <= c <= "\udfff" for c in json.dumps(value, ensure_ascii=False))
        return
    assert json.loads(body.render()) == value
    rendered = json.loads(body.render(without=("stream",), extra={"max_tokens": b"1"}))
    assert rendered == {**{k: v for k, v in value.items() if k != "stream"}, "max_tokens": 1}


@given(OBJECTS)
def test_owned_fields_never_survive(value: dict[str, Any]) -> None:
    body = Body.parse(json.dumps(value).encode())
    for rendered in (whole_body(body), *(prefill_body(kind, body, b"{}") for kind in ALL), decode_body(body, b"{}")):
        sent = json.loads(rendered)
        assert sent.get("kv_transfer_params") in (None, {})
        inner = sent.get("vllm_xargs")
        assert not (OWNED - {"kv_transfer_params"}) & set(sent)
        assert not (OWNED & set(inner) if isinstance(inner, dict) else ())


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        body = Body.parse(raw)
    except BadRequestError:
        return
    assert isinstance(json.loads(body.render().decode("utf-8", "surrogateescape"), strict=False), dict)


def test_messages_of_refusals_show_no_content() -> None:
    with pytest.raises(BadRequestError) as refused:
        Body.parse(b'{"prompt":"canary" oops}')
    assert "canary" not in refused.value.message
    assert "byte" in refused.value.message


def sent_to_prefill(kind: Any, **fields: Any) -> Any:
    body = Body.parse(json.dumps(fields).encode())
    return json.loads(prefill_body(kind, body, b"{}"))


def test_messages_api_on_the_prefill_hop() -> None:
    fields = {"model": "m", "messages": [], "system": "s", "max_tokens": 50, "stop_sequences": ["x"], "stream": True,
              "thinking": {"type": "enabled", "budget_tokens": 9}}  # fmt: skip
    sent = sent_to_prefill(MESSAGES, **fields)
    assert sent["max_tokens"] == 1
    assert sent["stream"] is False
    assert "stop_sequences" not in sent
    assert sent["thinking"] == fields["thinking"]
    assert sent["system"] == "s"


@pytest.mark.parametrize(("choice", "sent"), [("auto", "auto"), ("none", "none"), ("any", "none"), ("tool", "none")])
def test_messages_api_forced_tools(choice: str, sent: str) -> None:
    got = sent_to_prefill(MESSAGES, messages=[], tools=[], tool_choice={"type": choice, "name": "f"})
    assert got["tool_choice"]["type"] == sent


def test_messages_api_keeps_the_effort_and_drops_the_format() -> None:
    got = sent_to_prefill(MESSAGES, messages=[], output_config={"effort": "low", "format": {"type": "json_schema"}})
    assert got["output_config"] == {"effort": "low"}


def test_responses_api_on_the_prefill_hop() -> None:
    got = sent_to_prefill(RESPONSES, input="x", instructions="i", max_output_tokens=50, store=True, stream=True,
                          text={"format": {"type": "json_object"}}, tool_choice="required")  # fmt: skip
    assert got["max_output_tokens"] == 1
    assert got["store"] is False
    assert got["stream"] is False
    assert got["instructions"] == "i"
    assert "text" not in got
    assert got["tool_choice"] == "auto"


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"previous_response_id": "resp_1"},
        {"previous_input_messages": []},
        {"tools": [{"type": "web_search"}]},
        {"tools": [1]},
    ],
)
def test_responses_that_belong_to_one_engine(fields: dict[str, Any]) -> None:
    assert RESPONSES.whole_because(Body.parse(json.dumps({"input": "x", **fields}).encode()))


def test_responses_with_functions_are_split() -> None:
    raw = json.dumps({"input": "x", "tools": [{"type": "function", "name": "f"}]}).encode()
    assert RESPONSES.whole_because(Body.parse(raw)) is None


def test_deeply_nested_bodies_are_refused() -> None:
    with pytest.raises(BadRequestError):
        Body.parse(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


def test_parameters_of_chat_stay_when_forcing_is_kept() -> None:
    body = Body.parse(b'{"messages":[],"tool_choice":"required"}')
    assert json.loads(prefill_body(CHAT, body, b"{}", keep_forcing=True))["tool_choice"] == "required"


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    mark, raw = b"\xef\xbb\xbf", b'{"a": "\xef\xbb\xbf", "b": 1}'
    assert Body.parse(mark + raw).render() == Body.parse(raw).render()
    assert Body.parse(mark + rb'{"a": "\ud800"}').raw("a") == rb'"\ud800"'
    for bad in (mark, mark + mark + raw, mark[:2] + raw, mark * 100_000, mark + b"[]"):
        with pytest.raises(BadRequestError):
            Body.parse(bad)
