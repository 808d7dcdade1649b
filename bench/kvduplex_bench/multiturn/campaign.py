"""A whole run: one cluster after the other, results into one record, whatever ends it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn import stage as stages
from kvduplex_bench.multiturn.journal import FORMAT, Journal
from kvduplex_bench.multiturn.progress import Reporter
from kvduplex_bench.multiturn.results import load
from kvduplex_bench.multiturn.sweep import Sweep, points
from kvduplex_bench.multiturn.target import Target
from kvduplex_bench.multiturn.workload import Arm, Workload

__all__ = ["Act", "Campaign"]

_LEAST_READ: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Act:
    """One cluster and its arms.

    Attributes:
        setting: Its name in the record.
        arms: Arms to play there.
        open: Starts or finds the cluster for the length of a block; gives it, and what to keep about it.
        own: The cluster is started for the run on this host, so that the host's own bandwidth is its bandwidth.
    """

    setting: str
    arms: Sequence[Arm]
    open: Callable[[], AbstractContextManager[tuple[Target, Mapping[str, Any]]]]
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is run.

    Attributes:
        workload: What to play.
        acts: Clusters, in order.
        model: Name of the model in requests; None for the only one.
        headers: Sent with every request.
        timeout_s: Longest time of one request.
        check: Compare answers with a plain engine where there is one.
        details: Further things that make results comparable, as the size of the model.
    """

    workload: Workload
    acts: Sequence[Act]
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    check: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The same for runs whose results may stand in one record."""
        value = {
            "workload": self.workload.as_json(),
            "acts": [[act.setting, [str(arm) for arm in act.arms]] for act in self.acts],
            "model": self.model,
            "details": dict(self.details),
        }
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def keys(self) -> list[str]:
        """Every segment of the run."""
        return [point.key for act in self.acts for point in points(self.workload, act.setting, act.arms)]

    def run(self, journal: Journal, reporter: Reporter, provenance: Mapping[str, Any]) -> None:
        """Play what the journal does not hold yet; however it ends, the journal says whether it is complete.

        Raises:
            BenchError: A cluster does not start, cannot play the workload, or is gone.
        """
        journal.write("run", **self._opening(provenance))
        reason = "interrupted"
        try:
            for act in self.acts:
                self._act(act, journal, reporter)
            reason = ""
        except BenchError as error:
            reason = str(error)
            raise
        finally:
            missing = len(set(self.keys) - journal.done)
            _end(journal, complete=not reason and not missing, missing=missing, reason=reason)

    def _opening(self, provenance: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "workload": self.workload.as_json(),
            "details": dict(self.details),
            **provenance,
        }

    def _act(self, act: Act, journal: Journal, reporter: Reporter) -> None:
        if all(point.key in journal.done for point in points(self.workload, act.setting, act.arms)):
            return
        reporter.say(f"Cluster: {act.setting}")
        with act.open() as (target, about):
            journal.write("cluster", setting=act.setting, **about)
            sweep = Sweep(
                workload=self.workload,
                target=target,
                arms=act.arms,
                journal=journal,
                reporter=reporter,
                model=self.model,
                headers=self.headers,
                timeout_s=self.timeout_s,
                check=self.check,
            )
            asyncio.run(sweep.run())
            if act.own:
                _measure_bandwidth(act.setting, journal)


def _measure_bandwidth(setting: str, journal: Journal) -> None:
    """Read over loopback what a turn's prefill read in this very setting: as much, in pieces as large."""
    results = load(journal.path)
    cells = [cell for cell in results.of_arm(setting, Arm.ON) if cell.pulled_bytes_per_turn >= _LEAST_READ]
    if not cells:
        return
    largest = cells[-1].counted
    piece = largest.pulled_bytes // max(1, largest.pulled_pieces)
    pieces = sorted({max(1, round(cell.pulled_bytes_per_turn / piece)) for cell in cells})
    journal.write("bandwidth", setting=setting, reads=list(_reads(stages.bandwidth(piece, pieces))))


def _reads(text: str) -> Iterator[dict[str, Any]]:
    for raw in text.splitlines():
        line = json.loads(raw)
        size = line["blocks"] * line["block_bytes"]
        yield {"bytes": size, "pieces": line["blocks"], "seconds": line["interface_s"]}


def _end(journal: Journal, *, complete: bool, missing: int, reason: str) -> None:
    try:
        journal.write("end", complete=complete, missing=missing, reason=reason)
    except BenchError:
        # What stopped the run may be the disk; without this line the record counts as partial all the same.
        return
    finally:
        journal.close()
