"""The picture of `lastrow info --plot`: layers, who owns K/V, who reads whom, where the cut is, and the work of each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FORMATS = (".svg", ".png", ".pdf")
COLORS = {"sliding": "#4c78a8", "full": "#e4813a"}
WORK = {
    "kv": ("K/V projections", "#54a24b"),
    "attention": ("other attention", "#86bcd6"),
    "mlp": ("MLP", "#b9b4d8"),
    "ple": ("PLE", "#d8b26e"),
}
FADED = 0.3


def plot(document: dict[str, Any], path: str | Path) -> None:
    """Draw the document of `info.describe` to an SVG, PNG or PDF file. Raises ValueError for another suffix."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--plot {path}: the name must end in {', '.join(FORMATS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None

    figure = Figure(figsize=(max(7.5, 0.27 * document["layers"] + 1.6), 6.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(1.15, 1), sharex=True)
    _draw_layers(top, document)
    _draw_work(bottom, document)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _draw_layers(axes: Any, d: dict[str, Any]) -> None:
    from matplotlib.patches import Arc, Patch, Rectangle

    for row in d["layer_table"]:
        i, color, owner = row["layer"], COLORS[row["type"]], row["kv_source"] == row["layer"]
        axes.add_patch(Rectangle((i - 0.42, 0), 0.84, 1, facecolor=color if owner else "white", edgecolor=color, linewidth=1.4))
        axes.text(i, 0.5, str(i), ha="center", va="center", fontsize=7, color="white" if owner else color)
        if not owner:
            width = i - row["kv_source"]
            center = (i + row["kv_source"]) / 2
            axes.add_patch(Arc((center, 1), width, 0.28 * width**0.75, theta1=0, theta2=180, color=color, linewidth=0.9, alpha=0.75))
    reach = max((row["layer"] - row["kv_source"] for row in d["layer_table"]), default=0)
    height = 1.25 + 0.14 * reach**0.75
    axes.plot([d["cut"]] * 2, [1, height + 0.5], color="black", linewidth=1.2, linestyle="--", zorder=3)
    if d["cut"] < 0.7 * d["layers"]:
        axes.text(d["cut"] - 0.25, height + 0.28, "every row", ha="right", va="center", fontsize=9)
        axes.text(d["cut"] + 0.25, height + 0.28, "cut: wanted rows only", ha="left", va="center", fontsize=9)
    else:
        axes.text(d["cut"] - 0.25, height + 0.28, "every row; after the cut wanted rows only", ha="right", va="center", fontsize=9)
    axes.set_xlim(-0.8, d["layers"] - 0.2)
    axes.set_ylim(-0.15, height + 0.6)
    axes.set_yticks([])
    axes.spines[["left", "right", "top", "bottom"]].set_visible(False)
    axes.tick_params(bottom=False)
    kinds = {row["type"] for row in d["layer_table"]}
    handles = [Patch(facecolor=color, label=f"{kind}, writes K/V") for kind, color in COLORS.items() if kind in kinds]
    if len(d["owners"]) < d["layers"]:
        handles += [Patch(facecolor="white", edgecolor=color, label=f"{kind}, reads") for kind, color in COLORS.items() if kind in kinds]
    axes.legend(handles=handles, loc="upper left", fontsize=8, frameon=False, ncols=1)
    title = f"{d['model']}: {len(d['owners'])} of {d['layers']} layers store keys and values"
    costs = next(iter(d["kv_bytes_per_token"].items()))
    axes.set_title(f"{title}  ({costs[1]['full']:,} + {costs[1]['sliding']:,} bytes per token in {costs[0]})", fontsize=10)


def _draw_work(axes: Any, d: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    base = [0.0] * d["layers"]
    handles = []
    for part, (label, color) in WORK.items():
        values = [
            (row["macs"]["attention"] - row["macs"]["kv"] if part == "attention" else row["macs"][part]) / 1e6 for row in d["layer_table"]
        ]
        if not any(values):
            continue
        for i, value in enumerate(values):
            every_row = i < d["cut"] or (i == d["cut"] and part == "kv")
            axes.bar(i, value, 0.84, bottom=base[i], color=color, alpha=1.0 if every_row else FADED)
        base = [b + v for b, v in zip(base, values, strict=True)]
        handles.append(Patch(facecolor=color, label=label))
    handles.append(Patch(facecolor="gray", alpha=FADED, label="faded: wanted rows only"))
    work = d["work_per_prompt_token"]["projections_and_ple"]
    axes.plot([d["cut"]] * 2, [0, 1.12 * max(base)], color="black", linewidth=1.2, linestyle="--")
    axes.set_ylim(0, 1.3 * max(base))
    axes.legend(handles=handles, loc="upper left", fontsize=8, frameon=False, ncols=len(handles))
    axes.set_ylabel("million MACs per row")
    axes.set_xlabel(
        f"layer\n{work['total'] / 1e6:,.4g} million multiply-accumulates per prompt token, "
        f"{work['with_cut'] / 1e6:,.4g} million with the cut (at most {work['ceiling_with_cut']:.2f}x faster)"
    )
    axes.spines[["right", "top"]].set_visible(False)
