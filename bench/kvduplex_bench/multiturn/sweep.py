"""All segments of one cluster in an order that spreads what else the machine does over all arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.journal import Journal
from kvduplex_bench.multiturn.progress import Reporter
from kvduplex_bench.multiturn.segment import Clients, Point, Segment, play_segment
from kvduplex_bench.multiturn.target import Client, Served, Target
from kvduplex_bench.multiturn.workload import Arm, Workload

__all__ = ["Sweep", "points"]

_WARM_UP_TOKENS: Final = 128
_WARM_UP_WORDS: Final = 100


def points(workload: Workload, setting: str, arms: Sequence[Arm]) -> Iterator[Point]:
    """Repeats outermost, so that a run that is stopped has every point; arms take turns in beginning."""
    for repeat, (index, prefix) in product(range(workload.repeats), enumerate(workload.prefixes)):
        first = (repeat + index) % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            yield Point(setting, arm, prefix, repeat)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A workload against one cluster.

    Attributes:
        workload: What to play.
        target: The cluster.
        arms: Which arms.
        journal: Where results go.
        reporter: Told of each segment.
        model: Name of the model; None for the only one.
        headers: Sent with every request.
        timeout_s: Longest time of one request.
        check: Compare a turn of each point's first repeat with the reference engine.
    """

    workload: Workload
    target: Target
    arms: Sequence[Arm]
    journal: Journal
    reporter: Reporter
    model: str | None
    headers: Mapping[str, str]
    timeout_s: float
    check: bool

    async def run(self) -> None:
        """Play what the journal does not hold yet.

        Raises:
            BenchError: The cluster cannot play this workload, or is gone.
        """
        todo = [point for point in self._points() if point.key not in self.journal.done]
        if not todo:
            return
        await self._refuse_unfit()
        served = await self._client(self.target.routers[self.arms[0]]).served(self.model)
        if served.max_model_len is not None:
            self.workload.must_fit(served.max_model_len)
        await self._warm_up(served)
        for point in todo:
            await self._one(point, served)

    def _points(self) -> Iterator[Point]:
        return points(self.workload, self.target.setting, self.arms)

    async def _refuse_unfit(self) -> None:
        if not self.target.engines.known:
            if Arm.FLOOR in self.arms:
                raise BenchError("--arms floor: fills the prefill engines' caches; name them with --prefill URL")
            return
        if set(self.arms) & {Arm.ON}:
            await self.target.engines.must_have_connector()
        if Arm.FLOOR in self.arms and await self.target.engines.prefill_cache() is False:
            raise BenchError(
                "--arms floor: is the history in the prefill engines' own prefix cache, and these run without one; "
                "start them with prefix caching, or leave floor out"
            )

    async def _warm_up(self, served: Served) -> None:
        """Two turns an arm: the first transfer in either direction pays for a handshake between the engines.

        The answer is long enough that its KV is worth reading, also where prefill keeps its own.
        """
        for arm in dict.fromkeys(self.arms):
            client = self._client(self.target.routers[arm])
            messages = [{"role": "user", "content": "Hello! " * _WARM_UP_WORDS}]
            more = {"conversation": f"warm-up/{self.target.setting}/{arm}"}
            first = await client.whole(served.name, messages, answer_tokens=_WARM_UP_TOKENS, **more)
            answer = str(first["choices"][0]["message"]["content"])
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
            await client.whole(served.name, messages, answer_tokens=1, **more)

    async def _one(self, point: Point, served: Served) -> None:
        self.reporter.begin(point)
        found = await play_segment(
            self.workload,
            self.target,
            point,
            clients=self._clients(point.arm),
            served=served,
            check=self.check and point.repeat == 0 and point.arm in {Arm.ON, Arm.CONTINUE},
        )
        self._record(point, found)
        self.reporter.end(point, found)

    def _record(self, point: Point, found: Segment) -> None:
        for counts, turns in ((False, found.warm_up), (True, found.turns)):
            for turn in turns:
                self.journal.write("turn", segment=point.key, counts=counts, **turn.as_json())
        self.journal.write("segment", **point.as_json(), **found.as_json())

    def _clients(self, arm: Arm) -> Clients:
        engines, reference = self.target.engines.prefill, self.target.reference
        return Clients(
            router=self._client(self.target.routers[arm]),
            prefill=self._client(engines[0]) if engines else None,
            reference=self._client(reference) if reference else None,
        )

    def _client(self, url: str) -> Client:
        return Client(url, option="--url", headers=self.headers, timeout_s=self.timeout_s)
