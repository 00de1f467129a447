# SPDX-License-Identifier: Apache-2.0
"""`cachemend evaluate`: repair methods compared, as tables, figures and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachemend import ui

if TYPE_CHECKING:
    from pipelines.evaluate import EvaluationPlan

_QUALITY = {
    "F1": "f1",
    "EM": "em",
    "gold logprob": "gold_logprob",
    "KL to full": "kl_to_full",
    "same tokens": "token_agreement",
}
_ERRORS = {"KV MSE": "kv_mse_normalized", "K RMSE": "k_rmse", "V RMSE": "v_rmse", "attention RMSE": "attention_error"}
_COMPARED = {"gold logprob": "gold_logprob", "KL to full": "kl_to_full", "F1": "f1", "TTFT, ms": "ttft_ms"}
_TOGETHER = "all together"
_COSTS = (
    "times: median / 90th percentile; rows: share that the target recomputes, mean over layers;\n"
    "keys: share that these attend to, where a method chooses it (RelaxKV's |U| / N)"
)


def evaluate(
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: name, name:parameter=value, name@checkpoint. full and stale are always there."
        ),
    ],
    data: Annotated[
        list[str], typer.Option(help="A data set (JSONL or Parquet with id, question, answers, chunks); repeatable.")
    ],
    limit: Annotated[int, typer.Option(min=0, help="Most questions per data set, the first ones; 0 takes all.")] = 0,
    max_chunks: Annotated[int, typer.Option(min=1, help="Most chunks of a question, the first ones.")] = 20,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a question's chunks together; each chunk is cut to its share.")
    ] = 4096,
    articles: Annotated[
        str | None,
        typer.Option(
            help="Corpus (JSON, JSONL) for questions without chunks: best pieces by BM25, in --max-chunks windows."
        ),
    ] = None,
    glue_header: Annotated[
        bool,
        typer.Option(
            "--glue-header",
            help="Begin the first chunk with the header, as published inputs do; served, it has its own.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.", dir_okay=False, writable=True)
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            help="Write quality against latency to this PNG, and beside it heat maps of the KV error (NAME-kv-error).",
            dir_okay=False,
            writable=True,
        ),
    ] = None,
    work: Annotated[
        Path, typer.Option(help="Folder of work files, which a stopped run goes on from.", file_okay=False)
    ] = Path("data/evaluation"),
) -> None:
    """Compare repair methods with full prefill on questions that bring their own chunks.

    Says first what it costs. It can be stopped at any point; the same command measures only what is missing, and so
    does one with more methods or questions. Times are of one process with transformers, from stale KV in host memory.

    Examples:

      cachemend evaluate --methods cacherepair --data questions.jsonl --limit 20 --max-tokens 512

      cachemend evaluate --methods cacherepair,cacherepair:parts=v --data a.jsonl --data b.jsonl
      --json results.json --chart chart.png
    """
    from transformers.utils.logging import disable_progress_bar

    from kvcache.settings import load_settings
    from pipelines.evaluate import Evaluation, EvaluationJob
    from repair.spec import parse_methods

    disable_progress_bar()
    for path in (json_file, chart):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)  # found out now, not after hours
    job = EvaluationJob(
        parse_methods(methods), data, limit, max_chunks, max_tokens, work, articles, glue_header=glue_header
    )
    with ui.stages() as bar:
        evaluation = Evaluation(job, load_settings(), bar)
        plan = evaluation.plan()
        ui.say(announced(plan))
        result = evaluation.run()
    if (sessions := result["config"]["sessions"]) > 1:
        ui.say(
            f"times were taken in {sessions} runs: compare them with care, or measure anew with another --work folder"
        )
    if json_file is not None:
        json_file.write_text(ui.to_json(result) + "\n", encoding="utf-8")
    if chart is not None:
        _draw(result, chart)
    tables = result["data_sets"] if len(result["data_sets"]) > 1 else {}
    for name, summary in {**tables, ", ".join(result["data_sets"]) if not tables else _TOGETHER: result}.items():
        _print(f"{name}: {summary['requests']} questions", summary)


def announced(plan: EvaluationPlan) -> str:
    """What is about to be done, and how long it takes."""
    pairs = plan.requests * len(plan.methods)
    return (
        f"{plan.requests:,} questions, {plan.tokens:,} tokens of chunks, {len(plan.methods)} methods "
        f"({', '.join(plan.methods)}); {plan.missing:,} of {pairs:,} measurements to make, "
        f"about {ui.duration(plan.seconds_estimate)}"
    )


def _draw(result: Mapping[str, Any], chart: Path) -> None:
    from pipelines.evaluation.charts import kv_error_maps, quality_latency

    target = result["config"]["target"]["model"]
    title = f"{', '.join(result['data_sets'])} ({result['requests']} questions), {Path(target).name}"
    quality_latency(result, title, chart)
    maps = chart.with_stem(f"{chart.stem}-kv-error")
    if kv_error_maps(result, title, maps):
        ui.say(f"figures in {chart} and {maps}")


def _print(title: str, summary: Mapping[str, Any]) -> None:
    methods = summary["methods"]
    ui.out.print(f"\n{title}", style="bold", highlight=False)
    for columns in (_QUALITY, _ERRORS):
        table = new_table("method", *columns)
        for label, one in methods.items():
            table.add_row(label, *(number(one[metric]) for metric in columns.values()))
        ui.out.print(table)
    table = new_table("method", "TTFT, ms", "repair, ms", "GMAC", "rows", "keys", "KV", caption=_COSTS)
    for label, one in methods.items():
        times = (f"{one[name]['p50']:,.0f} / {one[name]['p90']:,.0f}" for name in ("ttft_ms", "repair_ms"))
        shares = (f"{one['shares'][name]:.0%}" if name in one["shares"] else "" for name in ("recomputed", "context"))
        macs, kv_bytes = f"{one['macs'] / 1e9:,.1f}", ui.size(one["memory"]["kv_bytes"])
        table.add_row(label, *times, macs, *shares, kv_bytes)
    ui.out.print(table)
    ui.out.print(_differences(summary))
    ui.out.print("within half of full's median TTFT, each method's largest preset:")
    for family, label in summary["half_budget"].items():
        ui.out.print(f"  {family}: {label or 'none'}", highlight=False)


def new_table(*headings: str, caption: str | None = None) -> Table:
    """A table whose first column is text and folds; the others are numbers."""
    table = Table(caption=caption, caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        first = heading is headings[0]
        table.add_column(heading, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    return table


def _differences(summary: Mapping[str, Any]) -> Table:
    caption = "differences with their paired 95 % bootstrap intervals; in TTFT, of medians"
    table = new_table("method", "minus stale", "minus full", caption=caption)
    for heading, metric in _COMPARED.items():
        table.add_section()
        table.add_row(f"[bold]{heading}[/bold]")
        for label, found in summary["intervals"].items():
            cells = ("" if label == other else _interval(found[metric][f"to_{other}"]) for other in ("stale", "full"))
            table.add_row(f"  {label}", *cells)
    return table


def _interval(found: Mapping[str, float]) -> str:
    return f"{number(found['difference'])} [{number(found['low'])}, {number(found['high'])}]"


def number(value: float | None) -> str:
    """For a cell; None is nothing."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"
