# SPDX-License-Identifier: Apache-2.0
"""`cachemend ingest`, `delete` and `precompute`: from files to chunk caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cachemend import ui

if TYPE_CHECKING:
    from kvcache.settings import Settings
    from pipelines.ingest import IngestReport
    from pipelines.precompute import FailedChunk, PrecomputePlan, PrecomputeReport

Corpus = Annotated[str, typer.Option(help="Name of the corpus.")]

MOST_SHOWN = 20
"""Bad records shown to a person; a program gets them all."""


def ingest(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="JSONL, Parquet, text or Markdown files, or folders of them; local or s3://, gs://, hdfs://."
        ),
    ],
    corpus: Corpus,
    replace: Annotated[
        bool, typer.Option("--replace", help="Make these inputs the whole corpus: other documents are removed.")
    ] = False,
    as_json: ui.AsJson = False,
) -> None:
    """Cut documents into chunks, embed them, and publish a new generation of the corpus's index.

    Documents are added to the corpus, or take the place of the one with their id. Run again, it computes only what
    changed. Records that cannot be read are reported with file and line, and do not stop the rest.

    Examples:

      cachemend ingest examples/corpus/passages.jsonl --corpus demo

      cachemend ingest s3://bucket/handbook/ notes/ --corpus handbook --json
    """
    from kvcache.settings import load_settings

    with ray_session():
        report = run_ingest(paths, corpus, load_settings(), replace)
    if as_json:
        ui.print_json(report)


def delete(
    ids: Annotated[list[str], typer.Argument(help="Ids of the documents, as ingest got or gave them.")],
    corpus: Corpus,
    as_json: ui.AsJson = False,
) -> None:
    """Delete documents: they are found no more once the command ends.

    Chunk caches stay in the store, where other corpora may use them. Ids that no document has are reported.

    Example:  cachemend delete handbook/travel.md --corpus handbook
    """
    from kvcache.settings import load_settings
    from pipelines.ingest import delete_documents

    report = delete_documents(corpus, ids, load_settings())
    for document_id in report.missing:
        ui.error(f"no document {document_id!r} in corpus {corpus!r}")
    if as_json:
        ui.print_json(report)
    else:
        ui.say(
            f"{corpus}: {report.removed:,} documents deleted; generation {report.generation}, {report.chunks:,} chunks"
        )


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

    with ray_session():
        plan, report = run_precompute(corpus, load_settings(), dry_run)
    if as_json:
        ui.print_json({"plan": plan, "report": report})


@contextmanager
def ray_session(address: str | None = None) -> Iterator[None]:
    """Connect to a Ray cluster (that of RAY_ADDRESS, or one that lives as long as this block) without its chatter."""
    import logging

    import ray
    import ray.data
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def run_ingest(paths: list[str], corpus: str, settings: Settings, replace: bool = False) -> IngestReport:
    """Ingest, with progress, and say how it went."""
    from pipelines.ingest import ingest

    with ui.stages() as progress:
        report = ingest(paths, corpus, settings, progress, replace=replace)
    for bad in report.bad_records[:MOST_SHOWN]:
        where = bad.file if bad.line is None else f"{bad.file}, line {bad.line}"
        ui.error(f"skipped {where}: {bad.reason}")
    if len(report.bad_records) > MOST_SHOWN:
        ui.error(f"skipped {len(report.bad_records) - MOST_SHOWN:,} more (--json lists them all)")
    ui.say(
        f"{corpus}: generation {report.generation} with {report.chunks:,} chunks, {report.tokens:,} tokens "
        f"(documents: {report.added:,} added, {report.unchanged:,} unchanged, {report.removed:,} removed)"
    )
    return report


def run_precompute(
    corpus: str, settings: Settings, dry_run: bool = False
) -> tuple[PrecomputePlan, PrecomputeReport | None]:
    """Say how much there is to do, then do it, with progress; no report when nothing is missing or on `dry_run`."""
    from pipelines import precompute as job

    with ui.stages() as progress:
        plan = job.plan(corpus, settings, progress)
    if not plan.missing:
        which = "chunks that the target can take" if plan.failed else "chunks"
        ui.say(f"{corpus}: all {plan.chunks - len(plan.failed):,} {which} are in the store")
        _say_failed(plan.failed)
        return plan, None
    ui.say(
        f"{corpus}: {plan.missing:,} of {plan.chunks:,} chunks to compute, {plan.tokens:,} tokens, "
        f"{ui.size(plan.bytes)}, about {ui.duration(plan.seconds_estimate)}"
    )
    if dry_run:
        return plan, None
    with ui.stages() as progress:
        report = job.precompute(plan, settings, progress)
    ui.say(
        f"{corpus}: {report.computed:,} chunks computed, {report.tokens:,} tokens, {ui.size(report.bytes)}, "
        f"in {ui.duration(report.seconds)}"
    )
    _say_failed(report.failed)
    return plan, report


def _say_failed(chunks: Sequence[FailedChunk]) -> None:
    for failed in chunks[:MOST_SHOWN]:
        ui.error(f"chunk {failed.key} ({failed.tokens} tokens) was not stored: {failed.reason}")
