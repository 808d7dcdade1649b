"""Generated text of a wanted length in tokens: nothing is downloaded, and a seed always gives the same text."""

from __future__ import annotations

import random
from typing import Final

__all__ = ["Corpus", "sample"]

_WORDS: Final = tuple(
    """time person year way day thing world life hand part child eye woman place work week case point company number
    group problem fact house water room mother area money story month lot right study book word business issue
    side kind head service friend father power hour game line end member law car city name president team minute
    idea body information back parent face others level office door health art war history party result change
    morning reason research girl guy moment air teacher force education open close read write carry hold send
    build count measure early late small large near far green blue quick slow warm cold first last next other new
    old good great little under over after before between against during without within along""".split()  # noqa: SIM905 - a list of words reads as words
)
_SENTENCE: Final = 12


class Corpus:
    """Texts by key.

    Args:
        seed: Another one gives other texts.
        tokens_per_word: How many tokens the served model's tokenizer makes of a word, on average.
    """

    def __init__(self, seed: int, tokens_per_word: float) -> None:
        self._seed = seed
        self._tokens_per_word = tokens_per_word

    def text(self, key: str, tokens: int) -> str:
        """About `tokens` tokens of text; the same for the same key."""
        return sample(f"{self._seed}/{key}", max(1, round(tokens / self._tokens_per_word)))


def sample(key: str, words: int) -> str:
    """`words` words in sentences, chosen by `key`."""
    chance = random.Random(key)
    chosen = [chance.choice(_WORDS) for _ in range(words)]
    sentences = (chosen[at : at + _SENTENCE] for at in range(0, words, _SENTENCE))
    return " ".join(" ".join([one[0].capitalize(), *one[1:]]) + "." for one in sentences)
