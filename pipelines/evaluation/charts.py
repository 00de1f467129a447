# SPDX-License-Identifier: Apache-2.0
"""The figures: quality against latency, quality against the chunks, and where the KV errors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipelines.evaluation.summary import REFERENCE

_PANELS = (
    ("f1", "F1 of the answer"),
    ("gold_logprob", "log-likelihood of the gold answer, per token"),
    ("kl_to_full", "KL(full || method), nats"),
)
_DPI = 150


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
    """Write heat maps of the relative RMS error of K and V, layer x head, a row of panels per method, as PNG.

    Methods without error (full) or without the chunks' own rows are left out.

    Args:
        summary, title, path: as for `quality_latency`.

    Returns:
        False when no method is left; then nothing is written.
    """
    maps = {
        label: [np.array(one["kv_error"][name]["by_layer_head"], dtype=float) for name in ("k", "v")]
        for label, one in summary["methods"].items()
        if label != REFERENCE and one["kv_error"] is not None
    }
    if not maps:
        return False
    figure = Figure(figsize=(9, 1.2 + 2.0 * len(maps)), layout="constrained")
    panels = figure.subplots(len(maps), 2, squeeze=False)
    for column, name in enumerate(("K", "V")):
        top = max(float(np.nanmax(pair[column])) for pair in maps.values())
        for row, (label, pair) in enumerate(maps.items()):
            axes = panels[row, column]
            image = axes.imshow(pair[column].T, aspect="auto", vmin=0, vmax=top, cmap="magma", origin="lower")
            axes.set_title(f"{label}: {name}", fontsize=8)
            axes.set(xlabel="layer", ylabel="KV head", yticks=range(pair[column].shape[1]))
        figure.colorbar(image, ax=list(panels[:, column]), label="relative RMS error")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=_DPI, format="png")
    return True
