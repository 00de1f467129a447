# SPDX-License-Identifier: Apache-2.0
"""Ingest: files become a new generation of a corpus. A Ray Data job that adds only what changed.

Reading, cutting and embedding run on the cluster; the table and the index are put together, and must fit, in the
memory of the process that calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from kvcache.settings import Settings
from pipelines.embedding import EmbedderFactory, embed_texts
from pipelines.ray_data import Progress
from pipelines.readers import BadRecord, InputFile, find_files
from pipelines.staging import BAD, CHUNK, UNCHANGED, stage_files
from retrieval.corpus import Corpus, is_corpus_name, table_schema
from retrieval.embedding import Embedder
from retrieval.errors import CorpusIntegrityError, UnknownCorpusError
from retrieval.manifest import IndexRecord, Manifest, Owner
from retrieval.publish import current_generation, publish
from retrieval.retriever import owner_of


class IngestError(ValueError):
    """The run cannot be carried out as asked; the corpus is as it was."""


@dataclass(frozen=True)
class IngestReport:
    """What a run did.

    Attributes:
        added: documents that are new, or whose content or chunking changed.
        unchanged: documents of the inputs that were there already.
        removed: documents that left the corpus.
        chunks: chunks of the corpus now.
        tokens: target tokens of the corpus now.
        embedded: chunks embedded in this run; all others kept their vectors.
        bad_records: what was left out, in the order of the inputs.
        generation: current generation; the one before when nothing changed, None when there is no corpus yet.
    """

    added: int
    unchanged: int
    removed: int
    chunks: int
    tokens: int
    embedded: int = 0
    bad_records: list[BadRecord] = field(default_factory=list)
    generation: str | None = None


@dataclass(frozen=True)
class DeleteReport:
    """What a deletion did.

    Attributes:
        removed: documents deleted.
        missing: ids that no document has.
        chunks: chunks of the corpus now.
        tokens: target tokens of the corpus now.
        generation: current generation: no search that starts in it returns the deleted documents.
    """

    removed: int
    missing: list[str]
    chunks: int
    tokens: int
    generation: str


def ingest(
    inputs: Sequence[str],
    corpus: str,
    settings: Settings,
    progress: Progress | None = None,
    *,
    replace: bool = False,
    embedder: EmbedderFactory = Embedder,
) -> IngestReport:
    """Bring documents into a corpus and publish the result as one new generation.

    Documents of the inputs are added; one whose id is there already replaces it; all others stay. A document whose
    content, chunking settings and tokenizer are as before keeps its rows and vectors. When nothing changed, nothing
    is published.

    Args:
        inputs: files and folders (JSONL, Parquet, .txt, .md), any location `pyarrow.fs` opens. Records need `text`
            (or `contents`, or `body`); `id`, `title` and `source` are optional. The id defaults to file and line.
        corpus: name of the corpus, made when there is none.
        settings: chunking, target, embedding, index, location.
        progress: told (stage, done, total) for the stages `read`, `embed` and `index`.
        replace: make the inputs the whole corpus: other documents are removed.
        embedder: makes the embedding model, in each actor.

    Raises:
        ValueError: `corpus` is not a name a corpus can have.
        InputError: an input does not exist or holds nothing readable.
        IngestError: `replace` without a single usable document.
        CorpusMismatchError: the corpus belongs to another tokenizer or embedding model, and `replace` is off.
        CorpusIntegrityError: the corpus is damaged, and `replace` is off.
        CorpusConflictError: another run published meanwhile.
    """
    if not is_corpus_name(corpus):
        raise ValueError(f"a corpus cannot be called {corpus!r}: use letters, digits, '.', '-' and '_', at most 100")
    progress = progress or _silent
    files = find_files(inputs)
    on_cpu = settings.embedding.model_copy(update={"device": "cpu"})  # here only to be asked who it is
    owner = owner_of(settings, embedder(settings.model_copy(update={"embedding": on_cpu})))
    based_on = current_generation(settings.corpora_uri, corpus)
    previous = _previous(settings, corpus, owner, replace)
    existing = previous.table if previous else table_schema(owner.embedding_dimension).empty_table()
    known = dict(zip(existing["document_id"].to_pylist(), existing["content_hash"].to_pylist(), strict=True))

    staged = stage_files(files, known, settings, progress)
    changed, unchanged, bad_records = _settle(staged, files)
    if replace and not (changed or unchanged):
        first = f"; the first bad record: {bad_records[0]}" if bad_records else ""
        raise IngestError(f"no usable document in the inputs: corpus {corpus!r} was not replaced{first}")
    removed = set(known) - set(changed) - set(unchanged) if replace else set()

    outdated = removed | set(changed)
    kept = _without(existing, outdated) if outdated else existing
    fresh = _chunk_rows(staged, changed)
    counts = {"added": len(changed), "unchanged": len(unchanged), "removed": len(removed), "embedded": len(fresh)}
    if previous and not outdated and previous.manifest.index == IndexRecord.of(settings.retrieval):
        return _report(previous.manifest, bad_records, counts)
    if not previous and not changed:
        return IngestReport(**counts, chunks=0, tokens=0, bad_records=bad_records)

    if len(fresh):
        vectors = embed_texts(fresh["text"], settings, embedder, progress)
        fresh = fresh.append_column("embedding", vectors).cast(table_schema(owner.embedding_dimension))
        kept = pa.concat_tables([kept, fresh])
    progress("index", 0, len(kept))
    manifest = publish(settings.corpora_uri, corpus, kept, owner, settings.retrieval, based_on)
    progress("index", len(kept), len(kept))
    return _report(manifest, bad_records, counts)


def delete_documents(corpus: str, ids: Sequence[str], settings: Settings) -> DeleteReport:
    """Delete documents, and publish the rest as a new generation; ids that no document has are reported.

    Raises:
        UnknownCorpusError: there is no such corpus.
        CorpusIntegrityError: the corpus is damaged.
        CorpusConflictError: another run published meanwhile.
    """
    current = _open_all(settings, corpus)
    present = set(current.table["document_id"].to_pylist())
    doomed = present & set(ids)
    missing = [document_id for document_id in dict.fromkeys(ids) if document_id not in present]
    manifest = current.manifest
    if doomed:
        rest = _without(current.table, doomed)
        manifest = publish(
            settings.corpora_uri, corpus, rest, manifest.owner, settings.retrieval, based_on=current.generation
        )
    return DeleteReport(len(doomed), missing, manifest.chunks, manifest.tokens, manifest.generation)


def _previous(settings: Settings, corpus: str, owner: Owner, replace: bool) -> Corpus | None:
    """The generation to build on, if there is one whose rows can be kept."""
    try:
        previous = _open_all(settings, corpus)
    except UnknownCorpusError:
        return None
    except CorpusIntegrityError:
        if replace:
            return None
        raise
    theirs = previous.manifest.owner
    if replace and (theirs.tokenizer_digest, theirs.embedding_model) != (owner.tokenizer_digest, owner.embedding_model):
        return None
    theirs.check(corpus, owner)
    return previous


def _open_all(settings: Settings, corpus: str) -> Corpus:
    return Corpus.open(settings.corpora_uri, corpus, columns=table_schema(1).names)


def _settle(staged: pa.Table, files: Sequence[InputFile]) -> tuple[dict[str, int], dict[str, int], list[BadRecord]]:
    """Decide which documents count: the first of each id.

    Returns:
        Documents to replace or add and documents that stay, each as id -> position (see `_positions`), and the bad
        records, duplicates among them.
    """
    changed: dict[str, int] = {}
    unchanged: dict[str, int] = {}
    places: dict[str, str] = {}
    bad_records = []
    heads = staged.filter(pc.field("kind").isin([BAD]) | (pc.field("ordinal") == 0))
    columns = ("kind", "file", "line", "document_id", "reason")
    rows = zip(*(heads[name].to_pylist() for name in columns), _positions(heads).to_pylist(), strict=True)
    for kind, file, line, document_id, reason, position in rows:
        source = files[file].source
        if kind != BAD and document_id in places:
            kind, reason = BAD, f"document id {document_id!r} is taken by {places[document_id]}"
        if kind == BAD:
            bad_records.append(BadRecord(source, line, reason))
            continue
        places[document_id] = f"{source}:{line}"
        (unchanged if kind == UNCHANGED else changed)[document_id] = position
    return changed, unchanged, bad_records


def _positions(staged: pa.Table) -> pa.ChunkedArray:
    """Where each row's document stands in the inputs: one number for file and line."""
    lines = pc.fill_null(staged["line"], 0)
    return pc.add(pc.shift_left(pc.cast(staged["file"], pa.int64()), 40), lines)


def _chunk_rows(staged: pa.Table, changed: dict[str, int]) -> pa.Table:
    """Corpus rows of the changed documents, still without embedding."""
    wanted = pc.and_(
        pc.equal(staged["kind"], CHUNK), pc.is_in(_positions(staged), pa.array(list(changed.values()), pa.int64()))
    )
    rows = staged.filter(wanted)
    # Padded, so that ids sort in the order of the document.
    ordinals = pc.utf8_lpad(pc.cast(rows["ordinal"], pa.string()), 5, "0")
    rows = rows.append_column("chunk_id", pc.binary_join_element_wise(rows["document_id"], ordinals, "#"))
    return rows.select([name for name in table_schema(1).names if name != "embedding"])


def _without(table: pa.Table, document_ids: set[str]) -> pa.Table:
    return table.filter(pc.invert(pc.is_in(table["document_id"], pa.array(sorted(document_ids), pa.string()))))


def _report(manifest: Manifest, bad_records: list[BadRecord], counts: dict[str, int]) -> IngestReport:
    return IngestReport(
        **counts,
        chunks=manifest.chunks,
        tokens=manifest.tokens,
        bad_records=bad_records,
        generation=manifest.generation,
    )


def _silent(stage: str, done: int, total: int | None) -> None:
    pass
