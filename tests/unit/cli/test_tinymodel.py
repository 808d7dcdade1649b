"""The generated model: the same bytes everywhere, a tokenizer that loses nothing, a cache that repairs itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvduplex.errors import ModelError
from kvduplex.locks import file_lock
from kvduplex.tinymodel import SIZES, ensure_model, model_folder
from kvduplex.tinymodel.bpe import to_symbols, train
from kvduplex.tinymodel.files import sha256_of, write_model
from kvduplex.tinymodel.sizes import ModelSize
from kvduplex.tinymodel.tensorfile import write_tensors
from kvduplex.tinymodel.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, tokenizer_files, vocabulary
from kvduplex.tinymodel.weights import tensor_shapes

TINY = SIZES["tiny"]


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the tiny model in it; tests copy what they damage."""
    cache = tmp_path_factory.mktemp("cache")
    ensure_model(TINY, cache, report=lambda _: None)
    return cache


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_every_size_has_the_pinned_bytes(size: ModelSize, tmp_path: Path) -> None:
    write_model(tmp_path, size)
    assert {path.name: sha256_of(path) for path in tmp_path.iterdir()} == dict(size.sha256)


def test_merges_take_the_most_frequent_pair_and_break_ties_by_text() -> None:
    assert train({"ab": 2, "cd": 2, "abcd": 1}, 10) == (("a", "b"), ("c", "d"), ("ab", "cd"))


def test_merges_handle_runs_of_one_symbol() -> None:
    assert train({"aaaa": 1}, 10) == (("a", "a"), ("aa", "aa"))


def test_byte_alphabet_has_no_duplicates() -> None:
    assert len(set(to_symbols("".join(map(chr, range(128)))))) == 128


def test_tensor_file_is_read_by_the_library(tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("safetensors.numpy")
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}
    write_tensors(tmp_path / "t", {name: tensor.shape for name, tensor in tensors.items()}, tensors.items())
    read = numpy_reader.load_file(tmp_path / "t")
    assert {name: value.tolist() for name, value in read.items()} == {n: t.tolist() for n, t in tensors.items()}


def test_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor a \(3,\), expected a \(2,\)"):
        write_tensors(tmp_path / "t", {"a": (2,)}, [("a", np.zeros(3, np.float32))])


def test_only_whole_words_and_the_end_have_an_output_row(pristine: Path) -> None:
    numpy_reader = pytest.importorskip("safetensors.numpy")
    head = numpy_reader.load_file(model_folder(TINY, pristine) / "model.safetensors")["lm_head.weight"]
    rows = set(np.flatnonzero(np.abs(head).sum(axis=1)).tolist())
    assert rows == {*vocabulary().spoken, vocabulary().end_of_turn}


def test_shapes_count_85_million_parameters() -> None:
    shapes = tensor_shapes(SIZES["85m"], vocabulary().size)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == pytest.approx(85e6, rel=0.02)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The generated tokenizer in the library that the engines use."""
    library = pytest.importorskip("tokenizers")
    return library.Tokenizer.from_str(tokenizer_files(vocabulary(), max_tokens=64)["tokenizer.json"].decode())


class TestTokenizer:
    """Nothing is lost, and an answer's text is its tokens."""

    @settings(max_examples=300, deadline=None)
    @given(text=st.text())
    def test_any_text_survives_the_round_trip(self, tokenizer: Any, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    @settings(max_examples=100, deadline=None)
    @given(picks=st.lists(st.integers(0, len(vocabulary().spoken) - 1), max_size=50))
    def test_an_answer_encodes_to_the_tokens_that_were_generated(self, tokenizer: Any, picks: list[int]) -> None:
        ids = [vocabulary().spoken[pick] for pick in picks]
        prompt = "assistant\n"
        assert tokenizer.encode(prompt + tokenizer.decode(ids)).ids == [*tokenizer.encode(prompt).ids, *ids]

    def test_special_tokens_are_one_token_each(self, tokenizer: Any) -> None:
        assert tokenizer.encode("".join(SPECIAL_TOKENS)).ids == [vocabulary().ids[token] for token in SPECIAL_TOKENS]


Render = Callable[..., str]


@pytest.fixture(scope="module")
def render() -> Render:
    """The chat template, rendered as transformers does but without loading it."""
    sandbox = pytest.importorskip("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(CHAT_TEMPLATE)
    return lambda messages, **other: str(template.render(messages=messages, **other))


class TestChatTemplate:
    """What makes a turn's KV reusable in the next."""

    def test_the_next_turn_extends_the_last(self, render: Render) -> None:
        first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        later = [*first, {"role": "assistant", "content": " a"}, {"role": "user", "content": "v"}]
        start = render(first, add_generation_prompt=True)
        assert render(later, add_generation_prompt=True).startswith(f"{start} a<|im_end|>\n<|im_start|>user\nv")

    def test_tools_and_tool_calls_are_shown(self, render: Render) -> None:
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        messages = [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42"},
        ]
        text = render(messages, tools=[{"name": "f"}])
        assert text.startswith('<|im_start|>system\nbe kind\n\ntools:\n{"name": "f"}<|im_end|>\n<|im_start|>user\n')
        assert '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>\n<|im_start|>tool\n42' in text

    def test_a_system_message_without_content_is_no_error(self, render: Render) -> None:
        assert "tools:" in render([{"role": "system", "content": None}], tools=[{"name": "f"}])


class TestCache:
    """Made once, checked on every use, repaired when damaged."""

    @staticmethod
    def _ensure(cache: Path, **other: float) -> list[str]:
        told: list[str] = []
        assert ensure_model(TINY, cache, report=told.append, **other) == model_folder(TINY, cache)
        return told

    def test_second_use_generates_nothing(self, pristine: Path) -> None:
        before = (model_folder(TINY, pristine) / "model.safetensors").stat()
        assert self._ensure(pristine) == []
        assert (model_folder(TINY, pristine) / "model.safetensors").stat().st_ino == before.st_ino

    @pytest.mark.parametrize("name", TINY.sha256)
    def test_one_changed_bit_is_found_and_repaired(self, name: str, tmp_path: Path) -> None:
        self._ensure(tmp_path)
        path = model_folder(TINY, tmp_path) / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        (told,) = self._ensure(tmp_path)
        assert f"damaged ({name} has SHA-256" in told
        assert sha256_of(path) == TINY.sha256[name]

    def test_a_missing_file_is_found_and_repaired(self, tmp_path: Path) -> None:
        self._ensure(tmp_path)
        path = model_folder(TINY, tmp_path) / "tokenizer.json"
        path.unlink()
        (told,) = self._ensure(tmp_path)
        assert "tokenizer.json is missing" in told
        assert path.is_file()

    def test_leftovers_of_a_maker_that_died_are_removed(self, tmp_path: Path) -> None:
        models = model_folder(TINY, tmp_path).parent
        (models / f".partial-{TINY.folder}-x" / "fresh").mkdir(parents=True)
        self._ensure(tmp_path)
        assert sorted(path.name for path in models.iterdir()) == [f".{TINY.folder}.lock", TINY.folder]

    def test_a_lock_that_stays_held_is_an_error_with_its_holder(self, tmp_path: Path) -> None:
        folder = model_folder(TINY, tmp_path)
        with (
            file_lock(folder.parent / f".{folder.name}.lock"),
            pytest.raises(ModelError, match=r"locked by process \d+ and was not released within 0\.1 s"),
        ):
            ensure_model(TINY, tmp_path, report=lambda _: None, lock_timeout_s=0.1)

    def test_of_several_processes_one_generates(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "kvduplex", "model", "make", "--cache", str(tmp_path)]
        makers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
        results = [maker.communicate(timeout=60) for maker in makers]
        assert [maker.returncode for maker in makers] == [0, 0, 0]
        assert {out.decode().strip() for out, _ in results} == {str(model_folder(TINY, tmp_path))}
        assert sorted(len(err.splitlines()) for _, err in results) == [0, 0, 1]

    def test_a_folder_that_cannot_be_written_is_explained(self, tmp_path: Path) -> None:
        (tmp_path / "models").write_text("a file where the folder should be")
        with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
            ensure_model(TINY, tmp_path, report=lambda _: None)
