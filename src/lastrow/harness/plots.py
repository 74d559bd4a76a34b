"""Pictures of benchmark records. matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#1f5fa8", "#e07b39", "#7a9e3d", "#8c5fa8", "#b04a5a", "#5a8f8f", "#8a8a8a")
INK, GRID = "#222222", "#d8d8d8"


def _axes(title: str, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: str | Path) -> None:
    """Write the picture; its ending chooses the format (svg, png, pdf). No date, no random ids: equal data give equal files."""
    from matplotlib import rc_context

    kind = Path(path).suffix.lower()
    with rc_context({"svg.hashsalt": "lastrow"}):
        figure.savefig(path, metadata={"Date": None} if kind == ".svg" else None)


def bars(
    path: str | Path,
    title: str,
    groups: Sequence[str],
    arms: Mapping[str, Sequence[float | None]],
    unit: str,
    spread: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
    number_format: str = "{:,.0f}",
    line: tuple[float, str] | None = None,
) -> None:
    """Grouped bars: one group per case, one bar per arm, the value written over each.

    arms: arm -> a value per group (None: not measured, no bar). spread: arm -> (low, high) per group, drawn as a whisker.
    line: a horizontal line and its label (a target or a limit)."""
    figure, axes = _axes(title, max(6.0, 1.0 + 0.62 * len(groups) * len(arms)), 3.8)
    width = 0.84 / len(arms)
    for n, (arm, values) in enumerate(arms.items()):
        x = [g - 0.42 + width * (n + 0.5) for g in range(len(groups))]
        axes.bar(x, [v or 0 for v in values], width * 0.92, label=arm, color=COLOURS[n % len(COLOURS)])
        for g, value in enumerate(values):
            if value is None:
                continue
            whisker = spread[arm][g] if spread and arm in spread else None
            top = value
            if whisker is not None:
                top = max(value, whisker[1])
                axes.plot([x[g], x[g]], whisker, color=INK, linewidth=1)
            axes.annotate(number_format.format(value), (x[g], top), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    if line is not None:
        axes.axhline(line[0], color=INK, linewidth=1, linestyle="--")
        axes.annotate(
            line[1], (1, line[0]), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right", fontsize=8
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit, fontsize=9, color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.margins(y=0.12)
    if len(arms) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=min(len(arms), 3))
    _save(figure, path)


def lines(
    path: str | Path,
    title: str,
    x: Sequence[float],
    arms: Mapping[str, Sequence[float | None]],
    x_label: str,
    y_label: str,
    log: bool = True,
    limits: Mapping[str, float] | None = None,
) -> None:
    """One line per arm over x, on logarithmic axes unless log is false; the arm's name stands at its last point.

    limits: label -> a horizontal line (a ceiling or a target)."""
    figure, axes = _axes(title, 7.0, 4.2)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    ends = []
    for n, (arm, values) in enumerate(arms.items()):
        points = [(a, b) for a, b in zip(x, values, strict=True) if b is not None]
        if not points:
            continue
        colour = COLOURS[n % len(COLOURS)]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.6, color=colour)
        ends.append((points[-1], arm, colour))
    for label, value in (limits or {}).items():
        axes.axhline(value, color=INK, linewidth=1, linestyle="--")
        axes.annotate(label, (0, value), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8)
    _name_ends(axes, ends)
    axes.set_xticks(list(x), [f"{value:,.0f}" for value in x])
    axes.minorticks_off()
    if log:
        from matplotlib.ticker import FuncFormatter, LogLocator

        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.grid(color=GRID, linewidth=0.6)
    _save(figure, path)


def _name_ends(axes: Any, ends: Sequence[tuple[tuple[float, float], str, str]]) -> None:
    """Write each arm's name right of its last point, moved apart where two would overlap."""
    step = 11.0  # points between the baselines of two names
    axes.margins(x=0.05)
    axes.figure.draw_without_rendering()
    placed: list[float] = []
    scale = 72 / axes.figure.dpi
    for (x, y), name, colour in sorted(ends, key=lambda end: end[0][1]):
        height = axes.transData.transform((x, y))[1] * scale
        shift = max([0.0, *(p + step - height for p in placed[-1:])])
        placed.append(height + shift)
        axes.annotate(
            name, (x, y), (7, shift - 3), textcoords="offset points", fontsize=8.5, color=colour, annotation_clip=False, fontweight="bold"
        )
