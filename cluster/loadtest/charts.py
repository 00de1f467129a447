# SPDX-License-Identifier: Apache-2.0
"""The figures: load curves, and a ramp over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

_DPI = 150
_PANELS = (
    ("throughput, requests/s", lambda cell: cell["throughput_rps"]),
    ("p95 time to first token, ms", lambda cell: cell["ttft_ms"]["p95"]),
    ("p95 end to end, ms", lambda cell: cell["e2e_ms"]["p95"]),
)
_LOADS = (("concurrency", "requests outstanding (closed loop)"), ("rate_rps", "arrivals per second (open loop)"))


def load_curves(report: Mapping[str, Any], path: Path) -> None:
    """Write throughput and p95 against load as PNG: a row of panels per kind of load, a line per method.

    Args:
        report: of a load test.
        path: of the file.
    """
    cells = report["cells"]
    kinds = [(key, name) for key, name in _LOADS if any(cell[key] is not None for cell in cells)]
    figure = Figure(figsize=(4.6 * len(_PANELS), 3.8 * len(kinds) + 0.4), layout="constrained")
    for row, (key, name) in zip(figure.subplots(len(kinds), len(_PANELS), squeeze=False), kinds, strict=True):
        loads = sorted({cell[key] for cell in cells if cell[key] is not None})
        for axes, (title, value) in zip(row, _PANELS, strict=True):
            for method in dict.fromkeys(cell["method"] for cell in cells):
                own = sorted(
                    (cell[key], value(cell))
                    for cell in cells
                    if cell["method"] == method and cell[key] is not None and value(cell) is not None
                )
                if own:
                    axes.plot(*zip(*own, strict=True), marker="o", linewidth=1.2, label=method)
            axes.set_xscale("log", base=2)
            axes.set_xticks(loads)
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set(xlabel=name, ylabel=title, ylim=(0, None))
            axes.grid(alpha=0.3)
        slo = report["config"]["slo_ttft_ms"]
        if slo is not None:
            row[1].axhline(slo, linestyle=":", color="grey", linewidth=1, label="objective")
    figure.axes[0].legend(fontsize=7)
    figure.suptitle(_title(report), fontsize=10)
    figure.savefig(path, dpi=_DPI, format="png")


def ramp_chart(report: Mapping[str, Any], path: Path) -> None:
    """Write concurrency, replicas (when the service told them), throughput and p95 over time as PNG.

    Args:
        report: of a ramp, with its timeline.
        path: of the file.
    """
    bins: Sequence[Mapping[str, Any]] = report["timeline"]
    methods = list(dict.fromkeys(one["method"] for one in bins))
    told = any("replicas" in one for one in bins)
    names = ["requests outstanding", *(["replicas"] if told else []), "throughput, requests/s", "p95 TTFT, ms"]
    figure = Figure(figsize=(8, 1.9 * len(names) + 0.6), layout="constrained")
    panels = dict(zip(names, figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], strict=True))
    for method in methods:
        own = [one for one in bins if one["method"] == method]
        times = [one["t_s"] for one in own]
        panels["requests outstanding"].step(times, [one["concurrency"] for one in own], where="post", label=method)
        panels["throughput, requests/s"].plot(times, [one["throughput_rps"] for one in own], marker=".")
        panels["p95 TTFT, ms"].plot(times, [one["ttft_p95_ms"] for one in own], marker=".")
        for deployment in sorted({name for one in own for name in one.get("replicas", {})}):
            counts = [one.get("replicas", {}).get(deployment, 0) for one in own]
            label = deployment if len(methods) == 1 else f"{deployment}, {method}"
            panels["replicas"].step(times, counts, where="post", label=label)
    if report["config"]["slo_ttft_ms"] is not None:
        panels["p95 TTFT, ms"].axhline(report["config"]["slo_ttft_ms"], linestyle=":", color="grey", linewidth=1)
    for name, axes in panels.items():
        axes.set(ylabel=name, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    if told:
        panels["replicas"].legend(fontsize=7)
    figure.axes[-1].set_xlabel("seconds")
    figure.suptitle(_title(report), fontsize=10)
    figure.savefig(path, dpi=_DPI, format="png")


def _title(report: Mapping[str, Any]) -> str:
    config = report["config"]
    stopped = "" if config["complete"] else " (stopped early: partial)"
    return f"{config['model'] or config['url']}{stopped}"
