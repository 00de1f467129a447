# SPDX-License-Identifier: Apache-2.0
"""The figure of a plan: what the fit predicts of the load test, and devices against the rate of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cluster.capacity.fit import Prediction
from cluster.capacity.size import Plan

_DPI = 150


def draw(
    predictions: Sequence[Prediction], plans: Mapping[float, Sequence[Plan]], asked: str, bound_ms: float, path: Path
) -> None:
    """Write the figure as PNG.

    Args:
        predictions: a load test's numbers beside the model's.
        plans: by requests per second, a plan per method.
        asked: the demand, for the title.
        bound_ms: of p95 TTFT.
        path: of the file.
    """
    figure = Figure(figsize=(13.5, 4.2), layout="constrained")
    rps, ttft, devices = figure.subplots(1, 3)
    for axes, name, label in (
        (rps, "throughput_rps", "requests per second"),
        (ttft, "ttft_ms.p95", "p95 time to first token, ms"),
    ):
        for colour, method in enumerate(dict.fromkeys(one.method for one in predictions)):
            of = [one for one in predictions if one.method == method and one.name == name]
            clients = [one.concurrency for one in of]
            axes.plot(clients, [one.predicted for one in of], color=f"C{colour}", label=f"{method}, model")
            axes.plot(clients, [one.measured for one in of], color=f"C{colour}", marker="o", linestyle="none")
        for at in {one.concurrency for one in predictions if one.fitted}:
            axes.axvline(at, linestyle=":", color="grey", linewidth=1)
        axes.set(xlabel="clients (dots: measured; dotted: fitted there)", ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(sorted({one.concurrency for one in predictions}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    rps.legend(fontsize=7)
    for method in dict.fromkeys(plan.method for row in plans.values() for plan in row):
        points = [(rate, plan) for rate, row in plans.items() for plan in row if plan.method == method]
        devices.plot([rate for rate, _ in points], [plan.devices for _, plan in points], marker="o", label=method)
    devices.set(
        xlabel="requests per second",
        ylabel=f"devices for p95 TTFT <= {bound_ms:.0f} ms",
        xscale="log",
        yscale="log",
    )
    devices.grid(alpha=0.3)
    devices.legend(fontsize=7)
    figure.suptitle(asked, fontsize=10)
    figure.savefig(path, dpi=_DPI, format="png")
