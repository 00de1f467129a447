# SPDX-License-Identifier: Apache-2.0
"""`cachemend ingest` and `cachemend precompute`: from files to chunk caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cachemend import ui

if TYPE_CHECKING:
    from kvcache.settings import Settings
    from pipelines.ingest import IngestReport
    from pipelines.precompute import PrecomputePlan, PrecomputeReport

Corpus = Annotated[str, typer.Option(help="Name of the corpus.")]


def ingest(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="JSONL, Parquet, text or Markdown files, or folders of them; local or s3://, gs://, hdfs://."
        ),
    ],
    corpus: Corpus,
    as_json: ui.AsJson = False,
) -> None:
    """Cut documents into chunks, embed them, and publish a new generation of the corpus's index.

    The paths together are the corpus: run it again and only what changed is computed, and what is gone is removed.
    Records that cannot be read are reported with file and line, and do not stop the rest.

    Examples:

      cachemend ingest examples/corpus/passages.jsonl --corpus demo

      cachemend ingest s3://bucket/handbook/ notes/ --corpus handbook --json
    """
    from kvcache.settings import load_settings

    report = run_ingest(paths, corpus, load_settings())
    if as_json:
        ui.print_json(report)


def precompute(
    corpus: Corpus,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what there is to do.")] = False,
    as_json: ui.AsJson = False,
) -> None:
    """Compute the KV cache of every chunk of a corpus that has none yet, and store it.

    Says first how much there is to do. It can be stopped at any point and started again.

    Example:  CACHEMEND_STORE__URI=s3://bucket/caches cachemend precompute --corpus handbook
    """
    from kvcache.settings import load_settings

    plan, report = run_precompute(corpus, load_settings(), dry_run)
    if as_json:
        ui.print_json({"plan": plan, "report": report})


def run_ingest(paths: list[str], corpus: str, settings: Settings) -> IngestReport:
    """Ingest and say how it went."""
    from pipelines.ingest import ingest

    report = ingest(paths, corpus, settings, ui.say)
    for bad in report.bad_records:
        ui.error(f"skipped {bad.file}, line {bad.line}: {bad.reason}")
    ui.say(
        f"{corpus}: generation {report.generation} with {report.chunks:,} chunks, {report.tokens:,} tokens "
        f"({report.added:,} added, {report.unchanged:,} unchanged, {report.removed:,} removed)"
    )
    return report


def run_precompute(
    corpus: str, settings: Settings, dry_run: bool = False
) -> tuple[PrecomputePlan, PrecomputeReport | None]:
    """Say how much there is to do, then do it unless `dry_run`."""
    from pipelines import precompute as job

    plan = job.plan(corpus, settings)
    ui.say(
        f"{corpus}: {plan.missing:,} of {plan.chunks:,} chunks to compute, {plan.tokens:,} tokens, "
        f"{ui.size(plan.bytes)}, about {ui.duration(plan.seconds_estimate)}"
    )
    return plan, None if dry_run else job.precompute(plan, settings, ui.say)
