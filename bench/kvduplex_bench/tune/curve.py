"""The curve behind the advice: what computing and what reading costs, against the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.workload import Arm
from kvduplex_bench.report.style import ARMS, note, styled
from kvduplex_bench.tune.advice import Advice
from kvduplex_bench.tune.costs import Compute, Read, Sample

__all__ = ["write_curve"]


def write_curve(
    path: Path,
    computed: Sequence[Sample],
    read: Sequence[Sample],
    costs: tuple[Compute, Read],
    advice: Advice,
    source: str,
) -> list[Path]:
    """Write PNG and SVG beside each other; returns both.

    Raises:
        BenchError: They cannot be written.
    """
    with styled():
        figure = _drawn(computed, read, costs, advice)
        note(figure, source)
        written = [path.with_suffix(".png"), path.with_suffix(".svg")]
        try:
            for one in written:
                figure.savefig(one)
        except OSError as error:
            raise BenchError(f"--output {path}: cannot be written ({error.strerror}); give another folder") from error
    return written


def _drawn(computed: Sequence[Sample], read: Sequence[Sample], costs: tuple[Compute, Read], advice: Advice) -> Figure:
    compute, reading = costs
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.035, 1, 0.965))  # type: ignore[union-attr, call-arg]
    axes = figure.subplots()
    lengths = [sample.tokens for sample in (*computed, *read)]
    tokens = np.geomspace(min(lengths) / 2, max(lengths), 200)
    slow, fast = ARMS[Arm.OFF], ARMS[Arm.ON]
    axes.plot(tokens, [compute.saved_s(n) * 1e3 for n in tokens], color=slow.colour, label="compute, without the step")
    axes.plot(tokens, [reading.seconds(n) * 1e3 for n in tokens], color=fast.colour, ls="--", label="read from decode")
    shown = [(s.tokens, (s.seconds - compute.fixed_s) * 1e3) for s in computed if s.seconds > compute.fixed_s]
    axes.plot(*zip(*shown, strict=True), ls="", marker=slow.marker, color=slow.colour, ms=4)
    axes.plot(
        [s.tokens for s in read], [s.seconds * 1e3 for s in read], ls="", marker=fast.marker, color=fast.colour, ms=4
    )
    if advice.kv_recompute_threshold is not None:
        axes.axvline(advice.kv_recompute_threshold, color="#555555", ls=":")
        axes.annotate(
            f"kv_recompute_threshold {advice.kv_recompute_threshold}",
            (advice.kv_recompute_threshold, 0.02), xycoords=("data", "axes fraction"),
            xytext=(4, 0), textcoords="offset points", fontsize=8.5,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens that the prefill engine lacks")
    axes.set_ylabel("time on the prefill engine (ms)")
    axes.set_title("Reading a decode engine's KV against computing it again")
    axes.legend(loc="upper left", fontsize=8.5)
    return figure
