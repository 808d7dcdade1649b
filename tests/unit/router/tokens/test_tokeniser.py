"""Prompts as the engine will see them, however they were put together from what was known before."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvduplex_router.errors import ConfigError
from kvduplex_router.events.hashing import chain, root, token_bytes
from kvduplex_router.requests.apis import CHAT, COMPLETIONS, MESSAGES
from kvduplex_router.requests.body import Body
from kvduplex_router.tokens.files import TokenizerFiles, load_files
from kvduplex_router.tokens.prompt import Prompt, TokenSource
from kvduplex_router.tokens.tokeniser import Tokeniser

Messages = list[dict[str, Any]]


@pytest.fixture(scope="session")
def files(model: Path) -> TokenizerFiles:
    return load_files(model)


def body(**members: Any) -> Body:
    return Body.parse(json.dumps({"model": "m", **members}).encode())


async def chat(tokeniser: Tokeniser, messages: Messages, **members: Any) -> Prompt:
    return await tokeniser.prompt(CHAT, body(messages=messages, **members))


def whole(files: TokenizerFiles, messages: Messages, **options: Any) -> bytes:
    """The prompt without any short cut."""
    assert files.template is not None
    text = files.template.render(messages, **options)
    return token_bytes(files.tokenizer.encode(text, add_special_tokens=False).ids)


def talk(turns: int, seed: int = 0, words: int = 30) -> Messages:
    rng = random.Random(seed)

    def say() -> str:
        return " ".join(rng.choice(["the", "of", "\n\n", "  two", "ééé", "七", "word."]) for _ in range(words))

    roles = ["user", "assistant"]
    return [{"role": "system", "content": say()}] + [
        {"role": roles[i % 2], "content": say()} for i in range(2 * turns - 1)
    ]


async def test_a_growing_conversation_has_the_tokens_of_the_whole_text(files: TokenizerFiles) -> None:
    tokeniser = Tokeniser(files)
    messages = talk(12)
    for turn in range(1, 12):
        history = messages[: 2 * turn]
        prompt = await chat(tokeniser, history)
        assert prompt.tokens == whole(files, history)
        assert list(prompt.chain(16)) == chain(root(16), prompt.tokens, 16)
        assert list(prompt.chain(64, scope="s")) == chain(root(64, "s"), prompt.tokens, 64)
    assert tokeniser.cached.hits == 10, "only the new turn was tokenised"
    assert len(tokeniser.cached) == 2, "the system prompt, and the latest beginning"


TEXT = st.text(alphabet=st.sampled_from("ab \n\t.é七<|im_end|>"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), TEXT, TEXT), min_size=1, max_size=12))
async def test_branches_edits_and_evictions_change_nothing(
    files: TokenizerFiles, steps: list[tuple[int, str, str]]
) -> None:
    tokeniser = Tokeniser(files, cache_bytes=2_000)
    histories: list[Messages] = [[{"role": "user", "content": "begin"}]]
    for pick, answer, question in steps:
        before = histories[pick % len(histories)]
        history = [*before, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        histories.append(history)
        prompt = await chat(tokeniser, history)
        assert prompt.tokens == whole(files, history)
        assert list(prompt.chain(4)) == chain(root(4), prompt.tokens, 4)


async def test_places_in_a_prompt_are_found_by_tokens(files: TokenizerFiles) -> None:
    messages = talk(3)
    prompt = await chat(Tokeniser(files), messages)
    for place, leading in (("system", 1), ("previous_turn", 5), ("few_shot", 5)):
        end = prompt.boundary(place)
        assert end is not None
        beginning = whole(files, messages[:leading], generation_prompt=False)
        assert prompt.tokens[: end * 4] == beginning[: end * 4]
        assert 0 <= len(beginning) - end * 4 <= 8, "up to a line break that the template puts between messages"


async def test_tools_and_the_prompt_of_tool_calls(files: TokenizerFiles) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "ü"]}'}}
    messages: Messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    tool = {"function": {"parameters": {"type": "object"}, "own": 1, "name": "f"}, "type": "function"}
    prompt = await chat(Tokeniser(files), messages, tools=[tool])
    seen: Messages = [
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "c", "function": {"arguments": {"a": [1, "ü"]}, "name": "f"}, "type": "function"}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]  # fmt: skip
    filled = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}
    assert prompt.tokens == whole(files, seen, tools=[filled])


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "content"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}, "api"),
        ({"messages": [{"role": 7}]}, "shape"),
        ({"messages": "text"}, "shape"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "shape"),
    ],
)
async def test_what_cannot_be_rendered_is_estimated_and_counted_by_reason(
    files: TokenizerFiles, members: dict[str, Any], reason: str
) -> None:
    tokeniser = Tokeniser(files)
    prompt = await tokeniser.prompt(CHAT, body(**members))
    assert prompt.source is TokenSource.ESTIMATE
    assert not prompt.exact
    assert tokeniser.failures == {reason: 1}
    assert tokeniser.counts == {TokenSource.ESTIMATE: 1}


async def test_estimates_of_a_growing_conversation_begin_alike_and_other_models_do_not() -> None:
    tokeniser = Tokeniser(None)
    messages = talk(6, words=100)
    early, late = [await chat(tokeniser, messages[:n]) for n in (4, 8)]
    other = await tokeniser.prompt(CHAT, Body.parse(json.dumps({"model": "n", "messages": messages[:8]}).encode()))
    first, second = early.chain(64), late.chain(64)
    assert list(second[: len(first) - 1]) == list(first[: len(first) - 1])
    assert not set(second) & set(other.chain(64))
    assert abs(late.count - len(json.dumps(messages[:8], ensure_ascii=True)) / 4) < 5


async def test_given_token_ids_are_taken_as_they_are(files: TokenizerFiles) -> None:
    prompt = await Tokeniser(files).prompt(COMPLETIONS, body(prompt=[1, 2, 3, 4]))
    assert (prompt.source, prompt.tokens, prompt.count) == (TokenSource.GIVEN, token_bytes([1, 2, 3, 4]), 4)
    odd = await Tokeniser(files).prompt(COMPLETIONS, body(prompt=[1, -2]))
    assert odd.source is TokenSource.ESTIMATE


async def test_texts_are_tokenised_whole(files: TokenizerFiles) -> None:
    text = "the of and " * 2_000  # long enough for another thread
    prompt = await Tokeniser(files).prompt(COMPLETIONS, body(prompt=text))
    assert prompt.tokens == token_bytes(files.tokenizer.encode(text).ids)


async def test_apis_whose_prompt_the_engine_makes_up_are_estimated(files: TokenizerFiles) -> None:
    prompt = await Tokeniser(files).prompt(MESSAGES, body(messages=talk(1)))
    assert prompt.source is TokenSource.ESTIMATE


async def test_salts_and_adapters_change_the_chain(files: TokenizerFiles) -> None:
    tokeniser = Tokeniser(files)
    plain, salted = [await chat(tokeniser, talk(2), **salt) for salt in ({}, {"cache_salt": "pepper"})]
    count = len(plain.chain(16))
    assert list(salted.chain(16)) == chain(root(16), plain.tokens, 16, [("pepper",)] + [None] * (count - 1))
    both = [("lora", "pepper")] + [("lora",)] * (count - 1)
    assert list(salted.chain(16, "lora")) == chain(root(16), plain.tokens, 16, both)


async def test_a_template_without_a_token_behind_messages_is_tokenised_whole(variant: Callable[..., Path]) -> None:
    files = load_files(variant("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"))
    tokeniser = Tokeniser(files)
    for turn in (1, 2, 3):
        messages = talk(3)[: 2 * turn]
        assert (await chat(tokeniser, messages)).tokens == whole(files, messages)
    assert len(tokeniser.cached) == 0


async def test_templates_run_in_a_sandbox(variant: Callable[..., Path]) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokeniser = Tokeniser(load_files(variant(escape)))
    prompt = await chat(tokeniser, talk(1))
    assert prompt.source is TokenSource.ESTIMATE
    assert tokeniser.failures == {"template": 1}


def test_a_missing_folder_and_a_broken_template_are_named(variant: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing/here.* does not exist; give the served model's folder"):
        load_files(Path("nothing/here"))
    with pytest.raises(ConfigError, match="line 1 of the chat template"):
        load_files(variant("{% for %}"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_files(tmp_path)


async def test_a_template_that_goes_through_parts_gets_parts(variant: Callable[..., Path]) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}"
        "{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    )
    files = load_files(variant(template))
    parts = [{"type": "text", "text": "two"}]
    messages: Messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": parts}]
    prompt = await chat(Tokeniser(files), messages)
    text = "<|im_start|>user[one]<|im_end|><|im_start|>assistant[two]<|im_end|>"
    assert prompt.tokens == token_bytes(files.tokenizer.encode(text, add_special_tokens=False).ids)
