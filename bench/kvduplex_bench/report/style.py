"""How figures look: colours that colour-blind readers tell apart, shapes and hatches that survive a grey print.

The colours are Okabe and Ito's (2008). No figure tells two things apart by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from kvduplex_bench.multiturn.workload import Arm

__all__ = ["ARMS", "PARTS", "PLANS", "Look", "note", "styled"]

_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _VERMILION, _PURPLE, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"


@dataclass(frozen=True, slots=True)
class Look:
    """How one thing is drawn wherever it appears.

    Attributes:
        label: In legends.
        colour: Of lines and areas.
        marker: Of points.
        dashes: Of lines.
        hatch: Of areas.
    """

    label: str
    colour: str
    marker: str = "o"
    dashes: str = "-"
    hatch: str = ""


ARMS: Final = {
    Arm.OFF: Look("off: recompute", _VERMILION, "s", "-"),
    Arm.ON: Look("on: KV flows back", _BLUE, "o", "-"),
    Arm.CONTINUE: Look("continue: no prefill hop", _GREEN, "D", "-."),
    Arm.FLOOR: Look("floor: all in prefill's cache", _BLACK, "^", "--"),
}
PARTS: Final = {
    "recompute_s": Look("compute", _VERMILION, hatch=""),
    "transfer_s": Look("transfer", _BLUE, hatch="///"),
    "claim_s": Look("claim", _ORANGE, hatch="xxx"),
    "queue_s": Look("queue and step under way", _GREY, hatch="..."),
}
PLANS: Final = {
    "pull": Look("pull", _BLUE, hatch=""),
    "recompute": Look("recompute", _VERMILION, hatch="///"),
    "continue": Look("continue", _GREEN, hatch="..."),
    "aggregate": Look("aggregate", _PURPLE, hatch="xxx"),
    "decode_only": Look("decode only", _ORANGE, hatch="\\\\\\"),
    "replica": Look("replica", _SKY, hatch="---"),
    "": Look("not said", _GREY, hatch="ooo"),
}

_SETTINGS: Final[Any] = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 150,
    "font.size": 10,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same figure on every machine
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvduplex",
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this style for the length of the block, whatever the reader's own configuration says."""
    with mpl.rc_context(), mpl.rc_context(_SETTINGS):
        yield


def note(figure: Figure, text: str) -> None:
    """Write where the figures come from below everything."""
    figure.text(0.01, 0.005, text, fontsize=7, color="#555555", ha="left", va="bottom")
