"""Token ids of requests: the served model's own tokenizer and chat template, with what was encoded before remembered.

A prompt is encoded between its special tokens, as the tokenizer itself does it, so a message that came before costs a
look-up. Answers are made of words that encode to one token each, whatever stands before them: a conversation's next
prompt extends its last one token by token.
"""

from __future__ import annotations

import json
import random
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvduplex_bench.sim.errors import SimError

__all__ = ["TemplateFailedError", "Tokens"]

_REMEMBERED_CHARACTERS: Final = 64 * 1024 * 1024
_WORD: Final = re.compile(r"Ġ[a-z]{2,12}")


class TemplateFailedError(Exception):
    """The chat template refused the messages; the message says why."""


class Tokens:
    """A tokenizer folder, as served models have it.

    Args:
        folder: Has ``tokenizer.json`` and, for chat, ``tokenizer_config.json`` with a chat template.

    Raises:
        SimError: A file is missing or wrong.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._encoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            settings = json.loads((folder / "tokenizer_config.json").read_text())
        except Exception as error:  # the library raises bare Exception
            raise SimError(f"no tokenizer in {folder}: {error}; name a model folder with tokenizer.json") from error
        special = [token.content for token in self._encoder.get_added_tokens_decoder().values() if token.special]
        self._special = {token: cast("int", self._encoder.token_to_id(token)) for token in special}
        self._split = re.compile("(" + "|".join(re.escape(token) for token in special) + ")") if special else None
        template = settings.get("chat_template") or "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
        self._seen: OrderedDict[str, list[int]] = OrderedDict()
        self._seen_characters = 0
        self.words = self._spoken()

    def chat(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> list[int]:
        """The prompt of a chat.

        Raises:
            TemplateFailedError: The template refuses the messages.
        """
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **extra)
        except (TemplateError, TypeError, AttributeError) as error:
            raise TemplateFailedError(str(error)) from error
        return self.text(text)

    def text(self, text: str) -> list[int]:
        """Token ids of a text, special tokens read as such."""
        ids: list[int] = []
        for part in self._split.split(text) if self._split else [text]:
            if part in self._special:
                ids.append(self._special[part])
            elif part:
                ids.extend(self._part(part))
        return ids

    def answer(self, seed: bytes, count: int) -> tuple[list[int], list[str]]:
        """A made-up answer of `count` tokens: their ids and their texts. The same seed gives the same answer."""
        chosen = random.Random(seed).choices(self.words, k=count)
        return [token for token, _ in chosen], [text for _, text in chosen]

    def _part(self, text: str) -> list[int]:
        found = self._seen.get(text)
        if found is not None:
            self._seen.move_to_end(text)
            return found
        found = self._seen[text] = self._encoder.encode(text, add_special_tokens=False).ids
        self._seen_characters += len(text)
        while self._seen_characters > _REMEMBERED_CHARACTERS and len(self._seen) > 1:
            self._seen_characters -= len(self._seen.popitem(last=False)[0])
        return found

    def _spoken(self) -> list[tuple[int, str]]:
        candidates = {
            token: " " + symbol[1:] for symbol, token in self._encoder.get_vocab().items() if _WORD.fullmatch(symbol)
        }
        words = [
            (token, text)
            for token, text in sorted(candidates.items())
            if self._encoder.encode(text, add_special_tokens=False).ids == [token]
        ]
        if not words:
            raise SimError("the tokenizer has no word that is one token; use the generated model's")
        return words
