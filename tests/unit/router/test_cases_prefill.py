"""Rows P1-P7: what each hop is sent, and what an unusable prefill answer leads to."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    start = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {"model": "m", **start, **fields}


LIMITS = [
    {},
    {"max_tokens": 9},
    {"max_completion_tokens": 9},
    {"max_tokens": 9, "max_completion_tokens": 8},
    {"max_tokens": 9, "min_tokens": 5},
    {"max_tokens": None, "min_tokens": 5, "ignore_eos": False},
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("limits", LIMITS, ids=json.dumps)
async def test_p1_prefill_makes_one_token_and_decode_gets_the_originals(
    make_cluster: Any, path: str, limits: dict[str, Any]
) -> None:
    cluster = await make_cluster()
    sent = body_for(path, **limits)
    assert (await cluster.client(path, sent)).status == 200
    prefill, decode = cluster.p.bodies[0], cluster.d.bodies[0]
    assert prefill["max_tokens"] == 1
    assert prefill.get("max_completion_tokens", 1) == 1
    assert "min_tokens" not in prefill
    assert prefill["ignore_eos"] is True
    decode.pop("kv_transfer_params")
    assert decode == sent


async def test_p2_stream_options_go_to_decode_only(make_cluster: Any) -> None:
    cluster = await make_cluster()
    options = {"include_usage": True, "continuous_usage_stats": True}
    await cluster.client.chat(stream=True, stream_options=options)
    assert "stream_options" not in cluster.p.bodies[0]
    assert cluster.p.bodies[0]["stream"] is False
    assert cluster.d.bodies[0]["stream_options"] == options
    assert cluster.d.bodies[0]["stream"] is True


async def _sse(request: Any) -> None:
    await request.begin_stream()
    await request.event({"choices": []})
    await request.end_stream()


async def _html(request: Any) -> None:
    page = b"<html></html>"
    await request.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page))


async def _empty(request: Any) -> None:
    await request.reply(b"")


async def _no_params(request: Any) -> None:
    await request.reply({"choices": [], "usage": {}})


async def _null_params(request: Any) -> None:
    await request.reply({"choices": [], "kv_transfer_params": None})


async def _no_blocks(request: Any) -> None:
    await request.reply({"kv_transfer_params": {"remote_block_ids": [], "remote_host": "127.0.0.1", "remote_port": 1}})


async def _params_of_wrong_type(request: Any) -> None:
    await request.reply({"kv_transfer_params": [1, 2]})


UNUSABLE = [_sse, _html, _empty, _no_params, _null_params, _no_blocks, _params_of_wrong_type]


@pytest.mark.parametrize("handler", UNUSABLE)
@pytest.mark.parametrize("policy", ["fail", "decode_only"])
async def test_p2_an_unusable_prefill_answer_is_a_counted_failure(make_cluster: Any, handler: Any, policy: str) -> None:
    cluster = await make_cluster(on_no_prefill=policy)
    cluster.p.handler = handler
    answer = await cluster.client.chat()
    assert cluster.metric("hop_failures_total", hop="prefill", reason="unusable") == 1
    if policy == "fail":
        assert answer.status == 502
        assert answer.json["error"]["code"] == "unusable"
        assert cluster.d.requests == []
    else:
        assert answer.status == 200
        assert answer.headers["x-kvduplex-plan"] == "decode_only"
        assert "kv_transfer_params" not in cluster.d.bodies[0]
    assert cluster.idle()


CONSTRAINTS = {
    "stop": ["END"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "logit_bias": {"5": -100},
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "logprobs": True,
    "top_logprobs": 3,
    "return_token_ids": True,
}
PROMPT_SHAPING = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}],
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "documents": [{"title": "t", "text": "x"}],
    "reasoning_effort": "low",
    "add_special_tokens": True,
    "truncate_prompt_tokens": 100,
    "mm_processor_kwargs": {"x": 1},
    "cache_salt": "salt",
    "priority": 1,
    "vendor_field": {"any": "thing"},
    "temperature": 0.5,
}


async def test_p3_prefill_is_free_of_constraints_and_keeps_what_shapes_the_prompt(make_cluster: Any) -> None:
    cluster = await make_cluster()
    await cluster.client.chat(**CONSTRAINTS, **PROMPT_SHAPING)
    prefill, decode = cluster.p.bodies[0], cluster.d.bodies[0]
    assert not set(CONSTRAINTS) & set(prefill)
    assert {name: prefill[name] for name in PROMPT_SHAPING} == PROMPT_SHAPING
    assert prefill["messages"] == decode["messages"]
    assert {name: decode[name] for name in CONSTRAINTS} == CONSTRAINTS


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "none"),
        ({"type": "function", "function": {"name": "f"}}, "none"),
    ],
)
async def test_p3_forced_tools_are_unforced_on_prefill(make_cluster: Any, choice: Any, sent: str) -> None:
    cluster = await make_cluster()
    await cluster.client.chat(tool_choice=choice, tools=PROMPT_SHAPING["tools"])
    assert cluster.p.bodies[0]["tool_choice"] == sent
    assert cluster.d.bodies[0]["tool_choice"] == choice


async def test_p3_forcing_can_be_kept_for_templates_that_render_it(make_cluster: Any) -> None:
    cluster = await make_cluster(forced_output_on_prefill=True)
    await cluster.client.chat(tool_choice="required", response_format={"type": "json_object"})
    assert cluster.p.bodies[0]["tool_choice"] == "required"
    assert cluster.p.bodies[0]["response_format"] == {"type": "json_object"}


RAW = (
    rb'{"model": "m", "messages": [{"role": "developer", "content": "\ud800 \u00e9 \\ud8ff"}, {"role":"system",'
    rb'"content":"x"}, {"content":null,"role":"assistant","tool_calls":[{"id":"1","function":{"arguments":"{\"a\":1}"}}'
    rb"]},"
    rb'{"role":"tool","content":"1"}], "seed": 123456789012345678901234567890, "temperature": 1.10, "top_p": 1e-1,'
    rb'"vendor": {"z": 1.0, "a": -0, "big": 1e400}, "user": "\ud83d\ude00"}'
)


async def test_p6_numbers_escapes_and_order_reach_engines_as_they_were_written(make_cluster: Any) -> None:
    cluster = await make_cluster()
    assert (await cluster.client(CHAT, RAW)).status == 200
    for piece in (
        b"123456789012345678901234567890", b"1.10", b"1e-1", b'{"z": 1.0, "a": -0, "big": 1e400}',
        rb"\ud800 \u00e9 \\ud8ff", rb"\ud83d\ude00", rb'"{\"a\":1}"',
    ):  # fmt: skip
        assert piece in cluster.d.requests[0].body, piece
        assert piece in cluster.p.requests[0].body, piece
    sent, got = json.loads(RAW), cluster.d.bodies[0]
    got.pop("kv_transfer_params")
    assert got == sent
    assert list(got) == list(sent)


async def test_p6_repeated_keys_count_once_as_engines_read_them(make_cluster: Any) -> None:
    cluster = await make_cluster()
    raw = b'{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"a"}],"max_tokens":4}'
    await cluster.client(CHAT, raw)
    assert cluster.d.requests[0].body.count(b"max_tokens") == 1
    assert cluster.d.bodies[0]["max_tokens"] == 4


ODD_MESSAGES: dict[str, Any] = {
    "null content": [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "x"},
    ],
    "empty": [],
    "image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
    "audio": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]}],
    "null entry": [None],
    "a string": "hello",
    "absent": None,
    "numbers": [1, 2],
}


@pytest.mark.parametrize("name", list(ODD_MESSAGES))
async def test_p7_odd_messages_are_the_engines_to_judge(make_cluster: Any, name: str) -> None:
    cluster = await make_cluster()

    async def judge(request: Any) -> None:
        await request.reply({"error": {"message": "no good", "type": "BadRequestError", "code": 400}}, status=400)

    cluster.p.handler = cluster.d.handler = judge
    body = {"model": "m", "messages": ODD_MESSAGES[name], "conversation_id": "c"}
    if ODD_MESSAGES[name] is None:
        del body["messages"]
    answer = await cluster.client(CHAT, body)
    assert answer.status == 400
    assert answer.json["error"]["message"] == "no good"


MALFORMED = [
    b"", b"{", b"[]", b"null", b'"x"', b"{'a':1}", b'{"a":1}x', b"\xff\xfe{\x00", b'{"a":NaN}', b"\x00",
    '{"messages":[]}'.encode("utf-16"), b'{"a":' + b"[" * 100_000, b'{"a":"\\ud800\\ue000"}', b"\xef\xbb\xbf[]",
]  # fmt: skip


@pytest.mark.parametrize("raw", MALFORMED, ids=lambda raw: repr(raw[:12]))
async def test_malformed_bodies_get_an_openai_error(make_cluster: Any, raw: bytes) -> None:
    cluster = await make_cluster()
    answer = await cluster.client(CHAT, raw, method="POST")
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["message"]
    assert cluster.p.requests == cluster.d.requests == []


WHOLE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"n": 2}),
    (CHAT, {"prompt_logprobs": 1}),
    (CHAT, {"prompt_logprobs": 0}),
    (CHAT, {"echo": True}),
    (CHAT, {"use_beam_search": True}),
    (TEXT, {"n": 2}),
    (TEXT, {"best_of": 3}),
    (TEXT, {"echo": True, "logprobs": 1}),
    (TEXT, {"echo": True, "max_tokens": 0}),
    (TEXT, {"prompt": ["a", "b"]}),
    (TEXT, {"prompt": ["a"]}),
    (TEXT, {"prompt": [[1, 2], [3]]}),
    (TEXT, {"prompt": []}),
    (TEXT, {"prompt": None, "prompt_embeds": "AA=="}),
    (TEXT, {"prompt_logprobs": 2}),
]


@pytest.mark.parametrize(("path", "fields"), WHOLE, ids=str)
async def test_what_cannot_be_split_goes_whole_to_one_engine(
    make_cluster: Any, path: str, fields: dict[str, Any]
) -> None:
    cluster = await make_cluster()
    sent = body_for(path, **fields)
    answer = await cluster.client(path, {**sent, "conversation_id": "c"})
    assert answer.status == 200
    assert answer.headers["x-kvduplex-plan"] == "aggregate"
    assert cluster.p.requests == []
    assert cluster.d.bodies == [sent]


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], [7]])
async def test_what_can_be_split_is(make_cluster: Any, prompt: Any) -> None:
    cluster = await make_cluster()
    answer = await cluster.client(TEXT, {"model": "m", "prompt": prompt, "n": 1, "best_of": 1})
    assert answer.headers["x-kvduplex-plan"] == "recompute"
    assert cluster.p.bodies[0]["prompt"] == prompt


async def test_plain_replicas_serve_whole_requests_in_turns(make_cluster: Any) -> None:
    cluster = await make_cluster(prefill=0, decode=0, engines=2)
    for _ in range(6):
        answer = await cluster.client.chat(stream=True)
        assert answer.headers["x-kvduplex-plan"] == "replica"
        assert answer.text == "Hello there"
    assert [len(engine.requests) for engine in cluster.replicas] == [3, 3]
    assert "kv_transfer_params" not in cluster.replicas[0].bodies[0]


async def test_different_prompt_counts_of_the_hops_raise_an_alarm(make_cluster: Any, caplog: Any) -> None:
    cluster = await make_cluster()
    usage = cluster.p.usage
    cluster.p.usage = lambda *args: {**usage(*args), "prompt_tokens": 11}
    await cluster.client.chat()
    assert cluster.metric("prompt_mismatches_total") == 1
    assert "chat templates or models differ" in caplog.text
