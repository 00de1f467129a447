# SPDX-License-Identifier: Apache-2.0
"""`cachemend plan`: how many GPUs, how much storage and network, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachemend import ui

if TYPE_CHECKING:
    from cluster.capacity.fit import Prediction
    from cluster.capacity.planner import Question, Study
    from cluster.capacity.size import Plan

_NAMES = {
    "throughput_rps": "req/s",
    "ttft_ms.p50": "TTFT p50, ms",
    "ttft_ms.p95": "TTFT p95, ms",
    "e2e_ms.p50": "e2e p50, ms",
    "e2e_ms.p95": "e2e p95, ms",
    "itl_ms.p50": "ITL p50, ms",
    "retrieve_ms.p50": "retrieve p50, ms",
    "mend_ms.p50": "mend p50, ms",
    "first_token_ms.p50": "first token p50, ms",
}
_CAPTION = "* seen by the fit; ± what chance alone does with so many requests (one standard deviation, %)"


def plan(
    rps: Annotated[float, typer.Option(min=0.001, max=1e6, help="Requests per second to serve.")] = 100.0,
    chunks: Annotated[
        float, typer.Option(min=1, max=1e12, help="Chunks in the corpus; 1e9 may be written.")
    ] = 1_000_000,
    ttft_ms: Annotated[float, typer.Option(min=0.001, help="Bound on p95 time to first token, milliseconds.")] = 500.0,
    fit: Annotated[
        Path | None,
        typer.Option(help="JSON of `cachemend loadtest` to fit on; without it, CacheRepair's published load test."),
    ] = None,
    at: Annotated[
        int | None, typer.Option(min=1, help="Concurrency of the cells to fit on; the others are predicted.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="qwen2.5-3b, llama-3.1-8b, qwen2.5-14b, or a model folder; with --fit, the settings'."),
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Mean document tokens of a prompt.")] = None,
    output_tokens: Annotated[float | None, typer.Option(min=1, help="Mean tokens of an answer.")] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 512,
    skew: Annotated[float, typer.Option(min=0, max=3, help="Zipf exponent of the chunks' popularity.")] = 0.9,
    host_gib: Annotated[float, typer.Option(min=0, help="Host memory per repair node for chunk caches, GiB.")] = 64.0,
    hop_gbps: Annotated[float, typer.Option(min=0.001, help="From a repair node to the engines, GB/s.")] = 12.0,
    storage_gbps: Annotated[float, typer.Option(min=0.001, help="From object storage to a repair node, GB/s.")] = 3.0,
    device_hour: Annotated[float, typer.Option(min=0, help="Dollars for a GPU hour.")] = 2.5,
    storage_tb_month: Annotated[float, typer.Option(min=0, help="Dollars for a TB of storage a month.")] = 23.0,
    chart: Annotated[Path | None, typer.Option(help="Write a figure to this PNG.", dir_okay=False)] = None,
    as_json: ui.AsJson = False,
) -> None:
    """Say what serves so many requests per second over so many chunks, and what gives way first.

    A simulation is fitted on one concurrency of a load test, shows how well it predicts the rest, and is then asked.
    Prices and links are assumptions: look at them. It takes some seconds of one core.

    Examples:

      cachemend plan --rps 10000 --chunks 1e9 --chart plan.png

      cachemend plan --fit loadtest.json --rps 2 --chunks 1000 --ttft-ms 5000
    """
    from cluster.capacity.demand import Demand, Hardware, Prices
    from cluster.capacity.planner import Question, study
    from kvcache.settings import load_settings

    question = Question(
        demand=Demand(rps, round(chunks), ttft_ms / 1e3, chunk_tokens, skew),
        hardware=Hardware(
            host_bytes=host_gib * 2**30,
            hop_bytes_per_s=hop_gbps * 1e9,
            storage_bytes_per_s=storage_gbps * 1e9,
            prices=Prices(device_hour=device_hour, storage_tb_month=storage_tb_month),
        ),
        load_test=fit,
        fitted_at=at,
        target=target,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    if chart is not None:
        chart.parent.mkdir(parents=True, exist_ok=True)
    with ui.waiting("fitting, then simulating"):
        found = study(question, load_settings())
    if chart is not None:
        from cluster.capacity.chart import draw

        draw(found.predictions, found.curve(), _asked(question, found), ttft_ms, chart)
        ui.say(f"figure in {chart}")
    if as_json:
        ui.print_json(_report(question, found))
        return
    _print(question, found)


def _asked(question: Question, found: Study) -> str:
    demand = question.demand
    return (
        f"{found.target}: {demand.rate:,g} requests per second over {demand.chunks:,} chunks of "
        f"{demand.chunk_tokens} tokens, p95 TTFT within {demand.ttft_s * 1e3:,.0f} ms"
    )


def _report(question: Question, found: Study) -> dict[str, Any]:
    return {
        "asked": question.demand,
        "hardware": question.hardware,
        "target": found.target,
        "workload": found.workload,
        "fit": {
            "source": found.source,
            "concurrency": found.fitted_at,
            "stages": found.stages,
            "worst_error": found.worst_error,
            "predictions": [{**vars(one), "error": one.error} for one in found.predictions],
        },
        "plans": found.plans,
        "impossible": found.impossible,
        "break_even": found.break_even,
    }


def _print(question: Question, found: Study) -> None:
    ui.out.print(f"\n{found.source}, fitted at C = {found.fitted_at}", style="bold", highlight=False)
    ui.out.print(_fit_table(found.predictions))
    ui.out.print(_asked(question, found), style="bold", highlight=False)
    if found.plans:
        ui.out.print(_plan_table(found.plans))
    for reason in found.impossible.values():
        ui.out.print(f"not possible: {reason}", highlight=False)
    if found.break_even:
        least, most = found.break_even["requests"]
        ui.out.print(
            f"A repair network pays after {least / 1e6:.1f} to {most / 1e6:.1f} million repaired requests: its "
            f"training takes {found.break_even['device_hours'][0]:.0f} to {found.break_even['device_hours'][1]:.0f} "
            f"GPU hours (published for Qwen2.5-3B), a repaired request saves {found.break_even['saving_ms']:.0f} ms.",
            highlight=False,
        )


def _fit_table(predictions: Sequence[Prediction]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=_CAPTION, caption_justify="left")
    concurrencies = sorted({one.concurrency for one in predictions})
    table.add_column("", no_wrap=True)
    for clients in concurrencies:
        table.add_column(f"C={clients}", justify="right", no_wrap=True)
    cells = {(one.method, one.name, one.concurrency): one for one in predictions}
    for method, name in dict.fromkeys((one.method, one.name) for one in predictions):
        row = [cells.get((method, name, clients)) for clients in concurrencies]
        table.add_row(f"{method} {_NAMES[name]}", *(f"{one.measured:,.4g}" if one else "" for one in row))
        table.add_row("  model", *(_modelled(one) if one else "" for one in row), style="dim")
    return table


def _modelled(one: Prediction) -> str:
    return f"{one.predicted:,.4g} ({one.error:+.0%} ±{one.spread * 100:.0f}){'*' if one.fitted else ''}"


def _bytes(count: float) -> str:
    return f"{count / 1e15:,.1f} PB" if count >= 1e15 else ui.size(count)


def _plan_table(plans: Sequence[Plan]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for one in plans:
        table.add_column(one.method, justify="right", no_wrap=True)

    def row(label: str, *values: str) -> None:
        table.add_row(label, *values)

    row("GPUs", *(f"{p.devices:,}" for p in plans))
    row("  engines", *(f"{p.engines:,}" for p in plans))
    row("  repair nodes (no GPU for stale)", *(f"{p.repairers:,}" for p in plans))
    row("    their number follows", *(p.repairers_set_by or "" for p in plans))
    row("retrievers", *(f"{p.retrievers:,}" for p in plans))
    row("  index in each", *(_bytes(p.index_bytes) for p in plans))
    row("p95 TTFT, ms", *(f"{p.p95_ttft_s * 1e3:,.0f}" for p in plans))
    row("gives way first", *(f"{p.bottleneck} ({p.used[p.bottleneck]:.0%})" for p in plans))
    row("chunk caches", *(_bytes(p.storage_bytes) for p in plans))
    row("  found in host memory", *(f"{p.host_hit_rate:.0%}" if p.storage_bytes else "" for p in plans))
    row("  read from storage, per second", *(_bytes(p.storage_bytes_per_s) for p in plans))
    row("  objects read, per second", *(f"{p.storage_reads_per_s:,.0f}" for p in plans))
    row("KV hop, per second", *(_bytes(p.hop_bytes_per_s) for p in plans))
    row("precompute once, GPU hours", *(f"{p.precompute_device_hours:,.1f}" for p in plans))
    row("dollars per hour", *(f"{sum(p.dollars_per_hour.values()):,.2f}" for p in plans))
    for part in plans[0].dollars_per_hour:
        row(f"  {part}", *(f"{p.dollars_per_hour[part]:,.2f}" for p in plans))
    return table
