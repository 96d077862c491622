"""Plots of a report as SVG, in a light and a dark dress. The only module that knows matplotlib.

Knows numbers and labels; what they are figures of, `training.report` knows. Labels may be anybody's text.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from training.errors import TrainingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Theme = Literal["light", "dark"]
# Of Okabe and Ito's colours, those that are told apart by everybody and seen on white and on black.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8a8a8a", "#b59f00")
_INK = {"light": "#1d2733", "dark": "#dde4ec"}
_GRID = {"light": "#c8d0d8", "dark": "#3d4854"}
_SIZE = (7.6, 3.4)  # inches


@dataclass(frozen=True)
class Point:
    """A figure with its interval, both ends None where there is none."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    label: str
    points: tuple[Point, ...]


def require() -> None:
    """Raises TrainingError where nothing can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise TrainingError(
            "a report is drawn with matplotlib, which is not installed: pip install 'draftloop[train]'"
        ) from None


def dots(series: Sequence[Series], x: str, y: str, theme: Theme, ticks: Sequence[str] | None = None) -> bytes:
    """Figures at whole x with their intervals, the series side by side at each."""

    def draw(axes: Axes) -> None:
        width = 0.7 / max(len(series), 1)
        for i, one in enumerate(series):
            shift = (i - (len(series) - 1) / 2) * width
            xs, ys = [point.x + shift for point in one.points], [point.y for point in one.points]
            below = [0.0 if point.low is None else max(point.y - point.low, 0.0) for point in one.points]
            above = [0.0 if point.high is None else max(point.high - point.y, 0.0) for point in one.points]
            colour = COLOURS[i % len(COLOURS)]
            axes.errorbar(xs, ys, [below, above], fmt="o", ms=5, capsize=3, color=colour, label=one.label)
        places = sorted({point.x for one in series for point in one.points})
        axes.set_xticks(places, list(ticks) if ticks else [f"{place:g}" for place in places])

    return _svg(draw, x, y, theme)


def lines(series: Sequence[Series], x: str, y: str, theme: Theme) -> bytes:
    """Figures over a running x."""

    def draw(axes: Axes) -> None:
        for i, one in enumerate(series):
            xs, ys = [point.x for point in one.points], [point.y for point in one.points]
            axes.plot(xs, ys, color=COLOURS[i % len(COLOURS)], lw=1.6, marker=".", ms=4, label=one.label)

    return _svg(draw, x, y, theme)


def _svg(draw: Callable[[Any], None], x: str, y: str, theme: Theme) -> bytes:
    """The same bytes for the same figures: no date, no random ids. Text is text: nothing in it is mathematics."""
    import matplotlib
    from matplotlib.figure import Figure

    ink = _INK[theme]
    settings = {
        "svg.hashsalt": "draftloop",
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 9,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), ink),
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=_SIZE, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(axis="y", color=_GRID[theme], lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        _, labels = axes.get_legend_handles_labels()
        if labels:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        held = io.BytesIO()
        figure.savefig(held, format="svg", metadata={"Date": None})
    return held.getvalue()
