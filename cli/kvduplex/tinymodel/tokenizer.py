"""The generated model's tokenizer files: byte-level BPE with a chat template, in the `tokenizers` library's format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvduplex.tinymodel.bpe import BYTE_ALPHABET, Merge, to_symbols, train
from kvduplex.tinymodel.words import WORDS

__all__ = ["CHAT_TEMPLATE", "END_OF_TURN", "PADDING", "SPECIAL_TOKENS", "Vocabulary", "tokenizer_files", "vocabulary"]

PADDING = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)

# ChatML. Rendering never rewrites earlier messages, so a conversation's next prompt extends its last one token by
# token, which is what makes its KV reusable.
CHAT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{- (messages[0].content or '') + '\\n\\n' }}{%- endif %}
{{- 'tools:' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_MAX_MERGES = 1721  # all that the word list has; a bound so that a longer list cannot grow the model unnoticed


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids by token text, in order of id.

    Attributes:
        ids: The byte alphabet, then merged tokens in order of training, then special tokens.
        merges: The merges that `ids` was built from.
        spoken: Ids of the tokens that are a space and a whole word; each encodes to itself alone.
    """

    ids: dict[str, int]
    merges: tuple[Merge, ...]
    spoken: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def end_of_turn(self) -> int:
        """Id of the token that ends an answer."""
        return self.ids[END_OF_TURN]

    @property
    def padding(self) -> int:
        """Id of the padding token."""
        return self.ids[PADDING]


@cache
def vocabulary() -> Vocabulary:
    """Train the tokenizer on the built-in words; takes about a second, once a process."""
    merges = train(_training_text(), _MAX_MERGES)
    tokens = [*BYTE_ALPHABET, *("".join(pair) for pair in merges), *SPECIAL_TOKENS]
    ids = {token: index for index, token in enumerate(tokens)}
    spoken = tuple(sorted(ids["".join(to_symbols(f" {word}"))] for word in WORDS))
    return Vocabulary(ids, merges, spoken)


def _training_text() -> dict[str, int]:
    """Each word inside a sentence, at a line's start and capitalised, with a frequency that falls with its rank."""
    frequencies: dict[str, int] = {}
    for rank, word in enumerate(WORDS):
        count = 100_000 // (rank + 10)
        for piece, weight in ((f" {word}", 4 * count), (word, count), (word.capitalize(), count // 2)):
            frequencies[piece] = frequencies.get(piece, 0) + weight
    return frequencies


def tokenizer_files(vocab: Vocabulary, *, max_tokens: int) -> dict[str, bytes]:
    """Content of ``tokenizer.json`` and ``tokenizer_config.json`` by file name.

    Args:
        vocab: What `vocabulary` returned.
        max_tokens: The model's longest context.
    """
    return {
        "tokenizer.json": _json_bytes(_pipeline(vocab)),
        "tokenizer_config.json": _json_bytes(_settings(vocab, max_tokens)),
    }


def _pipeline(vocab: Vocabulary) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab.ids[token], **_special(token)} for token in SPECIAL_TOKENS],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab.ids,
            "merges": [list(pair) for pair in vocab.merges],
        },
    }


def _settings(vocab: Vocabulary, max_tokens: int) -> dict[str, Any]:
    return {
        "added_tokens_decoder": {str(vocab.ids[token]): _special(token) for token in SPECIAL_TOKENS},
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": max_tokens,
        "pad_token": PADDING,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _special(token: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": token, **flags}


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()
