"""Measures on running engines: prompts computed in full, and turns whose history comes from the decode engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.corpus import Corpus
from kvduplex_bench.multiturn.engines import Counted, Engines
from kvduplex_bench.multiturn.target import Client, Served
from kvduplex_bench.scrape import Reading
from kvduplex_bench.tune.costs import Sample

__all__ = ["Capacity", "Probe", "capacity"]

_QUESTION_TOKENS: Final = 24
_ANSWER_TOKENS: Final = 8
_CACHE: Final = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Capacity:
    """A decode engine's KV cache.

    Attributes:
        block_size: Tokens of a block.
        tokens: Tokens of all blocks.
    """

    block_size: int
    tokens: int


def capacity(reading: Reading, url: str) -> Capacity:
    """Read it off an engine's metrics.

    Raises:
        BenchError: The engine does not say.
    """
    for name, labels in reading.samples:
        if name == _CACHE:
            told = dict(labels)
            size, blocks = told.get("block_size", ""), told.get("num_gpu_blocks", "")
            if size.isdigit() and blocks.isdigit():
                return Capacity(int(size), int(size) * int(blocks))
    raise BenchError(f"{url}/metrics does not tell the KV cache's size ({_CACHE}); is it a vLLM engine?")


class Probe:
    """Sends prompts nobody has seen.

    Args:
        router: The router, with reuse on.
        prefill: The prefill engine itself.
        engines: Whose metrics are read.
        served: The model.
        seed: Of the texts.
        told: Called with what was measured.
    """

    def __init__(
        self,
        *,
        router: Client,
        prefill: Client,
        engines: Engines,
        served: Served,
        seed: int,
        told: Callable[[str, Sample], None],
    ) -> None:
        self._router, self._prefill, self._engines, self._served = router, prefill, engines, served
        self._corpus = Corpus(seed, served.tokens_per_word)
        self._numbers = itertools.count()
        self._told = told

    async def compute(self, lengths: Sequence[int], repeats: int) -> list[Sample]:
        """Prompts computed in full by the prefill engine alone.

        Raises:
            BenchError: An engine does not answer, or serves others meanwhile.
        """
        found = []
        for length in _with_warm_up(lengths, repeats):
            counted = await self._counted(self._prefill, self._new(length), tokens=1)
            sample = Sample(counted.computed_tokens, counted.prefill_s)
            self._told("computed", sample)
            found.append(sample)
        return found[1:]

    async def read(self, lengths: Sequence[int], repeats: int, *, through_answers: bool) -> list[Sample]:
        """Second turns of conversations.

        Args:
            lengths: Tokens to be read.
            repeats: Turns of each length.
            through_answers: The prefill engine keeps what it computed, so what it has to read is an answer so long.

        Raises:
            BenchError: An engine does not answer, or serves others meanwhile.
        """
        found = []
        for length in _with_warm_up(lengths, repeats):
            sample = await self._second_turn(length, through_answers=through_answers)
            self._told("read", sample)
            found.append(sample)
        return found[1:]

    async def _second_turn(self, length: int, *, through_answers: bool) -> Sample:
        messages = self._new(_QUESTION_TOKENS if through_answers else length)
        conversation = f"tune-{next(self._numbers)}-{messages[0]['content'][:16]}"
        answer_tokens = length if through_answers else _ANSWER_TOKENS
        reply = await self._router.whole(
            self._served.name, messages, answer_tokens=answer_tokens, conversation=conversation
        )
        text = str(reply["choices"][0]["message"]["content"])
        question = self._corpus.text(f"question/{next(self._numbers)}", _QUESTION_TOKENS)
        grown = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": question}]
        counted = await self._counted(self._router, grown, tokens=1, conversation=conversation)
        return Sample(counted.pulled_tokens, counted.queue_s, counted.pulled_bytes)

    async def _counted(self, client: Client, messages: list[dict[str, str]], *, tokens: int, **more: Any) -> Counted:
        before = await self._engines.read()
        await client.whole(self._served.name, messages, answer_tokens=tokens, **more)
        return await self._engines.since(before, 1)

    def _new(self, tokens: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._corpus.text(f"new/{next(self._numbers)}", tokens)}]


def _with_warm_up(lengths: Sequence[int], repeats: int) -> list[int]:
    """Every length so often, and one more first: it pays for handshakes and for what is built lazily."""
    return [*lengths[:1], *(length for _ in range(repeats) for length in lengths)]
