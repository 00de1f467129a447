# SPDX-License-Identifier: Apache-2.0
"""The figures: quality against latency, quality against the chunks, and where the KV errors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipelines.evaluation.kv_error import DISTANCES, POSITION_BIN
from pipelines.evaluation.summary import REFERENCE
from pipelines.training.validation import REGIONS

_PANELS = (
    ("f1", "F1 of the answer"),
    ("gold_logprob", "log-likelihood of the gold answer, per token"),
    ("kl_to_full", "KL(full || method), nats"),
)
_DPI = 150
_PLACES = (
    ("by_position", "tokens from the prefix's beginning", lambda bins: [f"{n * POSITION_BIN}" for n in range(bins)]),
    ("by_distance", "tokens from the own chunk's beginning", lambda bins: [f"{n}" for n in DISTANCES[:bins]]),
    ("by_region", "region", lambda bins: list(REGIONS[:bins])),
)
"""Where a KV error is told beside layer and head: its key, what it is, and the names of its bins."""


def quality_latency(summary: Mapping[str, Any], title: str, path: Path) -> None:
    """Write the chart as PNG: a panel per measure of quality, a line per family of presets, half of full's TTFT marked.

    Args:
        summary: from `summary.summarise`.
        title: of the figure.
        path: of the file.
    """
    methods = summary["methods"]
    figure = Figure(figsize=(5.2 * len(_PANELS), 4.4), layout="constrained")
    for axes, (metric, name) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        families: dict[str, list[tuple[float, float, str]]] = {}
        for label, one in methods.items():
            families.setdefault(one["family"], []).append((one["ttft_ms"]["p50"], one[metric], label))
        for family, points in families.items():
            points.sort()
            x, y, labels = zip(*points, strict=True)
            axes.plot(x, y, marker="o", linewidth=1, label=family)
            for point in zip(x, y, labels, strict=True):
                # The legend names the family; what is left fits beside thirty others.
                setting = point[2].removeprefix(family).lstrip(":").removeprefix("preset=")
                axes.annotate(setting, point[:2], xytext=(4, 4), textcoords="offset points", fontsize=7)
        half = 0.5 * methods[REFERENCE]["ttft_ms"]["p50"]
        axes.axvline(half, linestyle=":", color="grey", linewidth=1)
        axes.annotate(
            "half of full",
            (half, 0.99),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=7,
            color="grey",
            va="top",
        )
        slowest = max(one["ttft_ms"]["p50"] for one in methods.values())
        axes.set(xlabel="median time to first token, ms", ylabel=name, xlim=(0, 1.2 * slowest))  # room for labels
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DPI, format="png")


def sensitivity(sweeps: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write sweeps as PNG: a row of panels per sweep, a line per method, chunk length or count on a logarithmic axis.

    Bars are the paired 95 % intervals of the difference to full prefill.

    Args:
        sweeps: from `sensitivity.sweeps`.
        title, path: as for `quality_latency`.
    """
    figure = Figure(figsize=(5.2 * len(_PANELS), 3.8 * len(sweeps)), layout="constrained")
    grid = figure.subplots(len(sweeps), len(_PANELS), squeeze=False)
    for row, sweep in zip(grid, sweeps, strict=True):
        values = sweep["values"]
        axis = "tokens of a chunk" if sweep["by"] == "tokens" else "chunks of equal length"
        for axes, (metric, name) in zip(row, _PANELS, strict=True):
            for label, one in sweep["methods"].items():
                y = np.array(one[metric])
                difference = y - np.array(sweep["methods"][REFERENCE][metric])
                low, high = np.array(one["intervals"][metric]).T
                # To rounding the difference lies inside its interval.
                bars = np.maximum([difference - low, high - difference], 0)
                axes.errorbar(values, y, yerr=bars, marker="o", linewidth=1, capsize=2, elinewidth=0.5, label=label)
            axes.set_xscale("log", base=2)
            axes.set(xlabel=f"{axis} ({sweep['data']})", ylabel=name, xticks=values, xticklabels=values)
            axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DPI, format="png")


def kv_error_maps(summary: Mapping[str, Any], title: str, path: Path) -> bool:
    """Write heat maps of the relative RMS error of K and V as PNG.

    A row of panels per method is layer x head; three rows below them are method x position in the prefix, method x
    distance from the beginning of the own chunk, and method x region. Methods without error (full) or without the
    chunks' own rows are left out.

    Args:
        summary, title, path: as for `quality_latency`.

    Returns:
        False when no method is left; then nothing is written.
    """
    errors = {
        label: one["kv_error"]
        for label, one in summary["methods"].items()
        if label != REFERENCE and one["kv_error"] is not None
    }
    if not errors:
        return False
    count = len(errors)
    figure = Figure(figsize=(9, 1.2 + 2.0 * count + len(_PLACES) * (1.0 + 0.25 * count)), layout="constrained")
    heights = [2.0] * count + [1.0 + 0.25 * count] * len(_PLACES)
    panels = figure.subplots(count + len(_PLACES), 2, squeeze=False, height_ratios=heights)
    for column, name in enumerate(("k", "v")):
        maps = [np.array(error[name]["by_layer_head"], dtype=float).T for error in errors.values()]
        top = max(float(np.nanmax(each)) for each in maps)
        for axes, label, each in zip(panels[:count, column], errors, maps, strict=True):
            image = axes.imshow(each, aspect="auto", vmin=0, vmax=top, cmap="magma", origin="lower")
            axes.set_title(f"{label}: {name.upper()}", fontsize=8)
            axes.set(xlabel="layer", ylabel="KV head", yticks=range(len(each)))
        figure.colorbar(image, ax=list(panels[:count, column]), label="relative RMS error")
        for axes, (key, place, ticks) in zip(panels[count:, column], _PLACES, strict=True):
            each = _by_place([error[name][key] for error in errors.values()])
            image = axes.imshow(each, aspect="auto", vmin=0, cmap="magma")
            axes.set_title(f"{name.upper()} by {place}", fontsize=8)
            names = ticks(each.shape[1])
            axes.set_xticks(range(len(names)), names, fontsize=6)
            axes.set_yticks(range(count), errors if column == 0 else [""] * count, fontsize=6)
            figure.colorbar(image, ax=axes)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DPI, format="png")
    return True


def _by_place(rows: Sequence[Mapping[str, float | None] | Sequence[float | None]]) -> np.ndarray:
    """A line per method; NaN where a bin has no tokens."""
    lines = [list(row.values()) if isinstance(row, Mapping) else list(row) for row in rows]
    longest = max(map(len, lines))
    return np.array([line + [None] * (longest - len(line)) for line in lines], dtype=float)
