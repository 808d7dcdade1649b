"""Generated traces with fixed seeds. docs/simulation.md says where their distributions come from."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvduplex_bench.traces.model import Conversation, Segment, Trace, Turn

__all__ = ["GENERATORS", "agents", "batch", "mix", "rag"]

_APPS: Final = 12
_STEPS_MEAN: Final = 8
_STEPS_MOST: Final = 24
_CONTEXT_MOST: Final = 30_000
_DOCUMENTS: Final = 800
_DOCUMENTS_EACH: Final = 3


def agents(count: int, seed: int) -> Trace:
    """Agents that call tools: a system prompt with tools, a task, then tool results seconds apart until the answer."""
    chance = random.Random(f"agents {seed}")
    starts = _arrivals(chance)
    return Trace(
        "agents",
        tuple(_agent(f"agent-{seed}-{n}", next(starts), chance) for n in range(count)),
        f"{_APPS} applications by Zipf's law, {_STEPS_MEAN} steps a task, tool results of 700 tokens in the middle, "
        "1.5 s in the middle between steps",
    )


def rag(count: int, seed: int) -> Trace:
    """Questions about documents out of a shared set, some popular; three in ten are followed by another question."""
    chance = random.Random(f"rag {seed}")
    starts, popular = _arrivals(chance), _zipf(chance, _DOCUMENTS, 1.05)
    lengths = [_tokens(chance, 900, 0.5, 4000) for _ in range(_DOCUMENTS)]
    return Trace(
        "rag",
        tuple(_question(f"rag-{seed}-{n}", next(starts), chance, popular, lengths) for n in range(count)),
        f"{_DOCUMENTS} documents of 900 tokens in the middle, {_DOCUMENTS_EACH} a question, by Zipf's law",
    )


def batch(count: int, seed: int) -> Trace:
    """Prompts that share nothing, as a batch job sends them."""
    chance = random.Random(f"batch {seed}")
    conversations = tuple(
        Conversation(
            name := f"batch-{seed}-{n}", "batch", 0.0,
            (Turn(0.0, (Segment("user", name, chance.randint(600, 1800)),), chance.randint(32, 96)),),
        )
        for n in range(count)
    )  # fmt: skip
    return Trace("batch", conversations, "unique prompts of 600 to 1,800 tokens, answers of 32 to 96", closed=True)


def mix(count: int, seed: int) -> Trace:
    """Half agents, a quarter questions about documents, a quarter unique prompts, all arriving at random."""
    chance = random.Random(f"mix {seed}")
    starts = _arrivals(chance)
    parts = (
        *agents(count // 2, seed).conversations,
        *rag(count // 4, seed).conversations,
        *batch(count - count // 2 - count // 4, seed).conversations,
    )
    order = chance.sample(parts, len(parts))
    placed = tuple(Conversation(each.id, each.kind, next(starts), each.turns) for each in order)
    return Trace("mix", placed, "half agents, a quarter rag, a quarter batch, by conversations")


GENERATORS: Final[Mapping[str, Callable[[int, int], Trace]]] = {
    "agents": agents, "rag": rag, "batch": batch, "mix": mix,
}  # fmt: skip
"""Generators by name; each takes a number of conversations and a seed."""


def _agent(name: str, start: float, chance: random.Random) -> Conversation:
    app = min(_APPS - 1, int(_APPS ** chance.random()) - 1)
    system = Segment("system", f"app-{app}", 2000 + 350 * (app * 5 % _APPS))
    steps = min(_STEPS_MOST, 1 + int(chance.expovariate(1 / (_STEPS_MEAN - 1))))
    turns = [Turn(0.0, (system, Segment("user", f"{name}-task", _tokens(chance, 200, 0.7, 2000))), _action(chance))]
    length = system.tokens + turns[0].new[1].tokens + turns[0].output_tokens
    for step in range(1, steps):
        found = Segment("tool", f"{name}-{step}", _tokens(chance, 700, 1.0, 8000))
        output = _tokens(chance, 200, 0.6, 800) if step == steps - 1 else _action(chance)
        length += found.tokens + output
        if length > _CONTEXT_MOST:
            break
        turns.append(Turn(_gap(chance, 1.5, 1.0, 60.0), (found,), output))
    return Conversation(name, "agents", start, tuple(turns))


def _action(chance: random.Random) -> int:
    return _tokens(chance, 120, 0.7, 600)


def _question(
    name: str, start: float, chance: random.Random, popular: Iterator[int], lengths: list[int]
) -> Conversation:
    chosen = list(dict.fromkeys(itertools.islice(popular, _DOCUMENTS_EACH)))
    documents = tuple(Segment("user", f"document-{each}", lengths[each]) for each in chosen)
    question = Segment("user", f"{name}-question", _tokens(chance, 40, 0.6, 300))
    first = Turn(0.0, (Segment("system", "rag", 300), *documents, question), _tokens(chance, 120, 0.6, 500))
    turns = [first]
    while chance.random() < 0.3 and len(turns) < 4:  # noqa: PLR2004 - four questions at most
        more = Segment("user", f"{name}-{len(turns)}", _tokens(chance, 30, 0.6, 200))
        turns.append(Turn(_gap(chance, 12.0, 0.8, 120.0), (more,), _tokens(chance, 120, 0.6, 500)))
    return Conversation(name, "rag", start, tuple(turns))


def _arrivals(chance: random.Random) -> Iterator[float]:
    """A Poisson process of rate one."""
    return itertools.accumulate(iter(lambda: chance.expovariate(1.0), None))


def _zipf(chance: random.Random, count: int, exponent: float) -> Iterator[int]:
    sums = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(count)))
    while True:
        yield bisect.bisect_left(sums, chance.random() * sums[-1])


def _tokens(chance: random.Random, middle: float, spread: float, most: int) -> int:
    return max(8, min(most, int(chance.lognormvariate(math.log(middle), spread))))


def _gap(chance: random.Random, middle: float, spread: float, most: float) -> float:
    return min(most, chance.lognormvariate(math.log(middle), spread))
