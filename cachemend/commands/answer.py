# SPDX-License-Identifier: Apache-2.0
"""`cachemend answer`: a whole data set of questions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachemend import ui
from cachemend.commands.corpus import ray_session

if TYPE_CHECKING:
    from pipelines.qa.job import AnswerReport


def answer(
    dataset: Annotated[
        str,
        typer.Argument(help="JSONL or Parquet: id, question, answers, and chunks unless --corpus is given; or a URI."),
    ],
    output: Annotated[str, typer.Option(help="File of the rows, .jsonl or .parquet; or a URI.")],
    methods: Annotated[
        str, typer.Option(help="Comma-separated: name, name:parameter=value, name@checkpoint.")
    ] = "full,stale",
    limit: Annotated[int, typer.Option(min=0, help="Most questions, the first ones; 0 takes all.")] = 0,
    corpus: Annotated[
        str | None, typer.Option(help="Search this corpus for each question, instead of the rows' own chunks.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Chunks to retrieve with --corpus.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 32,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Questions in flight in each actor; above 1, TTFT is that of a busy engine.")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what there is to do.")] = False,
    as_json: ui.AsJson = False,
) -> None:
    """Answer the questions of a data set by each method, and measure F1, EM, gold log-likelihood and TTFT.

    Says first how much there is to do. It can be stopped at any point; the same command goes on where it stopped. The
    run's configuration, digests and versions are in OUTPUT.run.json; another configuration needs another output.

    Example:  cachemend answer questions.jsonl --methods full,stale --limit 20 --output answers.parquet
    """
    from kvcache.settings import load_settings
    from pipelines.qa import job

    settings = load_settings()
    with ray_session():
        with ui.stages() as progress:
            plan = job.plan(
                dataset,
                methods,
                output,
                settings,
                limit=limit,
                corpus=corpus,
                top_k=top_k,
                max_tokens=max_tokens,
                concurrency=concurrency,
                progress=progress,
            )
        if plan.missing:
            ui.say(
                f"{plan.questions:,} questions by {plan.methods} methods: {plan.missing:,} of {plan.requests:,} "
                f"requests to do, {plan.prompt_tokens:,} prompt tokens, about {ui.duration(plan.seconds_estimate)}"
            )
        else:
            ui.say(f"all {plan.requests:,} requests are answered")
        if dry_run:
            if as_json:
                ui.print_json({"plan": plan})
            return
        with ui.stages() as progress:
            report = job.answer(plan, settings, progress)
    if as_json:
        ui.print_json({"plan": plan, "report": report})
        return
    ui.out.print(_table(report))
    for label, found in report.methods.items():
        if found.fallbacks:
            ui.error(f"{label}: {found.fallbacks:,} prompts were computed in full all the same, see column fallback")
    ui.say(f"{report.requests:,} rows in {report.output}, {report.computed:,} of them new")


def _table(report: AnswerReport) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold", min_width=12)
    for name in ("n", "F1", "EM", "gold logp", "TTFT p50", "p90", "cached", "prompt"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, found in report.methods.items():
        table.add_row(
            label,
            f"{found.n:,}",
            f"{found.f1:.3f}",
            f"{found.em:.3f}",
            f"{found.gold_logprob:.3f}",
            f"{found.ttft_p50_s * 1000:,.0f}",
            f"{found.ttft_p90_s * 1000:,.0f}",
            f"{found.cached_tokens:,.0f}",
            f"{found.prompt_tokens:,.0f}",
        )
    return table
