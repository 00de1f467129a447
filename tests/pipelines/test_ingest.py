# SPDX-License-Identifier: Apache-2.0
"""Ingest end to end on Ray Data: what is added, kept, replaced, removed, refused; and searched afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvcache.settings import Settings, load_settings
from kvcache.target import load_tokenizer
from pipelines.ingest import IngestError, IngestReport, delete_documents, ingest
from pipelines.readers import BadRecord, InputError
from retrieval.corpus import Corpus, table_schema
from retrieval.embedding import Embedder
from retrieval.errors import CorpusIntegrityError, CorpusMismatchError, UnknownCorpusError
from retrieval.retriever import Retriever
from tests.pipelines.inputs import write_jsonl
from tests.retrieval.fakes import HashingEmbedder, NegatedEmbedder, OtherEmbedder
from tests.s3 import s3_server
from tests.tiny import tiny_model_dir, tiny_settings

pytestmark = pytest.mark.usefixtures("ray_alone")

ANIMALS = [
    {"id": "fox", "title": "Foxes", "text": "the quick brown fox jumps over the lazy dog " * 8},
    {"id": "cat", "title": "", "text": "a cat sleeps all day"},
    {"id": "owl", "text": "an owl hunts at night"},
]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target") / "llama")


def settings_at(target_dir: Path, root: Path) -> Settings:
    settings = tiny_settings(target_dir, chunking={"max_tokens": 64, "overlap_tokens": 8})
    return settings.model_copy(update={"root": str(root)})


@pytest.fixture
def settings(target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return settings_at(target_dir, tmp_path / "data")


@pytest.fixture(scope="module")
def ingested(ray_alone: Any, target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, IngestReport]:
    """A folder in which `a.jsonl` (the animals) was ingested, and the report; for copying."""
    folder = tmp_path_factory.mktemp("ingested")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_jsonl("a.jsonl", ANIMALS)
        return folder, run(["a.jsonl"], settings_at(target_dir, folder / "data"))


@pytest.fixture
def first(ingested: tuple[Path, IngestReport], settings: Settings) -> IngestReport:
    """The working directory is a copy of what `ingested` made."""
    shutil.copytree(ingested[0], Path.cwd(), dirs_exist_ok=True)
    return ingested[1]


def run(inputs: Iterable[str], settings: Settings, **options: Any) -> IngestReport:
    return ingest(list(inputs), "c", settings, **{"embedder": HashingEmbedder, **options})


def rows_of(settings: Settings) -> pa.Table:
    return Corpus.open(settings.corpora_uri, "c", columns=table_schema(1).names).table


def vectors_of(settings: Settings) -> dict[str, np.ndarray]:
    table = rows_of(settings)
    return dict(zip(table["chunk_id"].to_pylist(), map(np.array, table["embedding"].to_pylist()), strict=True))


def documents_of(settings: Settings) -> set[str]:
    return set(rows_of(settings)["document_id"].to_pylist())


def found(settings: Settings, query: str) -> list[str]:
    retriever = Retriever(settings, HashingEmbedder())
    hits = retriever.search("c", [query], 100)[0]
    retriever.close()
    return [hit.document_id for hit in hits]


def test_documents_become_searchable_chunks(settings: Settings) -> None:
    write_jsonl("a.jsonl", ANIMALS)
    seen = []
    report = run(["a.jsonl"], settings, progress=lambda *step: seen.append(step))
    table = rows_of(settings)
    assert (report.added, report.unchanged, report.removed, report.bad_records) == (3, 0, 0, [])
    assert (report.chunks, report.embedded) == (len(table), len(table))
    assert report.tokens == sum(map(len, table["token_ids"].to_pylist()))
    assert table.schema.equals(table_schema(HashingEmbedder.dimension))

    tokenizer = load_tokenizer(settings)
    foxes = [row for row in table.to_pylist() if row["document_id"] == "fox"]
    assert [row["chunk_id"] for row in foxes] == [f"fox#{i:05d}" for i in range(len(foxes))]
    assert len(foxes) > 1
    for row in table.to_pylist():
        assert 0 < len(row["token_ids"]) <= 64
        assert tokenizer.decode(row["token_ids"]) == row["text"]
        assert np.array(row["embedding"]) == pytest.approx(HashingEmbedder().embed([row["text"]])[0], abs=1e-6)
        assert row["text"].startswith("Foxes\n") == (row["document_id"] == "fox")
        assert row["source"] == "a.jsonl"
    assert found(settings, "owl hunts")[0] == "owl"

    stages = {stage: (done, total) for stage, done, total in seen}
    assert stages == {"read": (1, 1), "embed": (len(table), len(table)), "index": (len(table), len(table))}


def test_the_same_inputs_again_publish_nothing(settings: Settings, first: IngestReport) -> None:
    again = run(["a.jsonl"], settings)
    assert (again.added, again.unchanged, again.embedded) == (0, 3, 0)
    assert (again.generation, again.chunks, again.tokens) == (first.generation, first.chunks, first.tokens)


def test_only_what_changed_is_cut_and_embedded(settings: Settings, first: IngestReport) -> None:
    before = vectors_of(settings)
    assert "fox#00001" in before
    changed = [{**ANIMALS[0], "text": "short"}, ANIMALS[1], {"id": "new", "text": "a new fish swims"}]
    write_jsonl("a.jsonl", changed)
    # This embedder points the other way, so vectors that were not computed anew show.
    report = run(["a.jsonl"], settings, embedder=NegatedEmbedder)
    after = vectors_of(settings)
    assert (report.added, report.unchanged, report.removed, report.embedded) == (2, 1, 0, 2)
    assert report.generation > first.generation
    assert set(after) == {"fox#00000", "cat#00000", "owl#00000", "new#00000"}  # no chunk of the longer fox is left
    for kept in ("cat#00000", "owl#00000"):
        assert (after[kept] == before[kept]).all()
    assert after["fox#00000"] == pytest.approx(-HashingEmbedder().embed(["Foxes\nshort"])[0], abs=1e-6)
    assert after["new#00000"] == pytest.approx(-HashingEmbedder().embed(["a new fish swims"])[0], abs=1e-6)


def test_other_chunking_settings_cut_and_embed_anew(settings: Settings, first: IngestReport) -> None:
    chunking = settings.chunking.model_copy(update={"max_tokens": 32, "overlap_tokens": 4})
    report = run(["a.jsonl"], settings.model_copy(update={"chunking": chunking}))
    assert report.chunks == report.embedded > first.chunks
    assert max(map(len, rows_of(settings)["token_ids"].to_pylist())) == 32


def test_another_index_kind_is_built_from_the_stored_vectors(settings: Settings, first: IngestReport) -> None:
    retrieval = settings.retrieval.model_copy(update={"index": "hnsw"})
    report = run(["a.jsonl"], settings.model_copy(update={"retrieval": retrieval}))
    assert report.generation > first.generation
    assert (report.added, report.unchanged, report.embedded) == (0, 3, 0)
    assert Corpus.open(settings.corpora_uri, "c").manifest.index.kind == "hnsw"
    assert found(settings, "owl hunts")[0] == "owl"


def test_replace_makes_the_inputs_the_whole_corpus(settings: Settings, first: IngestReport) -> None:
    write_jsonl("b.jsonl", [{**ANIMALS[2], "source": "a.jsonl"}, {"id": "new", "text": "fish"}])
    report = run(["b.jsonl"], settings, replace=True)
    assert (report.added, report.unchanged, report.removed, report.embedded) == (1, 1, 2, 1)
    assert set(found(settings, "fox owl cat")) == documents_of(settings) == {"owl", "new"}


def test_replace_without_a_usable_document_is_refused(settings: Settings, first: IngestReport) -> None:
    Path("b.jsonl").write_text("nonsense\n")
    with pytest.raises(IngestError, match=r"not replaced.*b\.jsonl"):
        run(["b.jsonl"], settings, replace=True)
    assert Corpus.open(settings.corpora_uri, "c").generation == first.generation


def test_bad_records_are_reported_in_order_and_the_rest_is_ingested(settings: Settings) -> None:
    Path("a.jsonl").write_text(
        '{"id": "one", "text": "first"}\nnonsense\n{"id": "two", "text": ""}\n{"text": "fine"}\n'
    )
    Path("docs").mkdir()
    Path("docs/bad.txt").write_bytes(b"a\n\xff")
    Path("docs/good.md").write_text("# Title\n\nbody")
    pq.write_table(pa.table({"text": ["row", None], "id": ["three", "four"]}), "docs/p.parquet")
    report = run(["a.jsonl", "docs"], settings)
    assert [(bad.file, bad.line) for bad in report.bad_records] == [
        ("a.jsonl", 2),
        ("a.jsonl", 3),
        ("docs/bad.txt", 2),
        ("docs/p.parquet", 2),
    ]
    assert report.added == 4
    assert documents_of(settings) == {"one", "a.jsonl:4", "docs/good.md", "three"}


def test_of_equal_ids_the_first_in_the_inputs_wins(settings: Settings) -> None:
    write_jsonl("a.jsonl", [{"id": "x", "text": "first"}, {"id": "x", "text": "second"}])
    write_jsonl("b.jsonl", [{"id": "x", "text": "third"}, {"id": "y", "text": "other"}])
    report = run(["a.jsonl", "b.jsonl"], settings)
    reason = "document id 'x' is taken by a.jsonl:1"
    assert report.bad_records == [BadRecord("a.jsonl", 2, reason), BadRecord("b.jsonl", 1, reason)]
    assert report.added == 2
    assert sorted(rows_of(settings)["text"].to_pylist()) == ["first", "other"]
    # Also when the one that comes second is what the corpus already holds.
    report = run(["b.jsonl", "a.jsonl"], settings)
    assert (report.added, report.unchanged, len(report.bad_records)) == (1, 1, 2)
    assert sorted(rows_of(settings)["text"].to_pylist()) == ["other", "third"]


def test_deleted_documents_are_never_found_again(settings: Settings, first: IngestReport) -> None:
    retriever = Retriever(settings, HashingEmbedder())
    assert "fox" in {hit.document_id for hit in retriever.search("c", ["fox"], 100)[0]}
    report = delete_documents("c", ["fox", "nope", "fox"], settings)
    assert (report.removed, report.missing) == (1, ["nope"])
    assert report.generation > first.generation
    retriever.refresh()
    result = retriever.query("c", ["fox", "quick brown"], 100)
    assert result.generation == report.generation
    assert {hit.document_id for hits in result.hits for hit in hits} == {"cat", "owl"}
    assert delete_documents("c", ["fox"], settings).generation == report.generation

    delete_documents("c", ["cat", "owl"], settings)
    retriever.refresh()
    assert retriever.search("c", ["fox"], 5) == [[]]
    retriever.close()
    with pytest.raises(UnknownCorpusError, match="known: 'c'"):
        delete_documents("d", ["x"], settings)


def test_a_corpus_of_another_embedding_model_is_refused_unless_replaced(
    settings: Settings, first: IngestReport
) -> None:
    with pytest.raises(CorpusMismatchError, match=r"hashing-embedder@1.*other-embedder@1"):
        run(["a.jsonl"], settings, embedder=OtherEmbedder)
    report = run(["a.jsonl"], settings, embedder=OtherEmbedder, replace=True)
    assert (report.added, report.embedded) == (3, report.chunks)
    assert Corpus.open(settings.corpora_uri, "c").manifest.owner.embedding_model == "other-embedder@1"


def test_a_damaged_corpus_is_refused_unless_replaced(settings: Settings, first: IngestReport) -> None:
    table = Path(settings.corpora_uri) / "c" / "generations" / first.generation / "chunks.parquet"
    table.write_bytes(table.read_bytes()[:-9])
    with pytest.raises(CorpusIntegrityError, match=r"chunks\.parquet"):
        run(["a.jsonl"], settings)
    assert run(["a.jsonl"], settings, replace=True).added == 3
    assert documents_of(settings) == {"fox", "cat", "owl"}


def test_inputs_and_names_that_cannot_be_are_refused_before_anything_runs(settings: Settings) -> None:
    with pytest.raises(InputError, match="missing"):
        run(["missing"], settings)
    write_jsonl("a.jsonl", ANIMALS)
    with pytest.raises(ValueError, match=r"cannot be called '\.\./x'"):
        ingest(["a.jsonl"], "../x", settings, embedder=HashingEmbedder)


def test_only_bad_records_make_no_corpus(settings: Settings) -> None:
    Path("a.jsonl").write_text("nonsense\n")
    report = run(["a.jsonl"], settings)
    assert (report.generation, report.chunks, len(report.bad_records)) == (None, 0, 1)
    assert not (Path(settings.corpora_uri) / "c" / "CURRENT").exists()


def test_inputs_and_corpora_in_s3(settings: Settings) -> None:
    with s3_server("bucket") as server:
        remote = settings.model_copy(update={"root": server.uri("bucket/root")})
        for i in range(2):
            body = "\n".join(json.dumps({**animal, "text": f"{animal['text']} {i}"}) for animal in ANIMALS)
            server.client.put_object(Bucket="bucket", Key="docs/a.jsonl", Body=body.encode())
            assert run([server.uri("bucket/docs")], remote).added == 3
        assert rows_of(remote)["source"].unique().to_pylist() == ["s3://bucket/docs/a.jsonl"]
        assert found(remote, "owl")[0] == "owl"
        last = delete_documents("c", ["owl"], remote).generation
        assert set(found(remote, "owl")) == {"fox", "cat"}
        keys = server.objects("bucket")
        assert "root/corpora/c/CURRENT" in keys
        generations = sorted(key.split("/")[4] for key in keys if key.endswith("/manifest.json"))
        assert len(generations) == 2 and generations[-1] == last


@pytest.mark.real
def test_real_models_find_the_passage_that_answers(tmp_path: Path) -> None:
    settings = load_settings(root=str(tmp_path / "data"))
    passages = {
        "eiffel": "The Eiffel Tower was completed in 1889 and stands in Paris.",
        "nile": "The Nile flows north through eleven countries into the Mediterranean Sea.",
        "photosynthesis": "Plants turn light, water and carbon dioxide into sugar and oxygen.",
    }
    write_jsonl(tmp_path / "a.jsonl", [{"id": name, "title": name, "text": text} for name, text in passages.items()])
    report = ingest([str(tmp_path / "a.jsonl")], "c", settings)
    assert (report.added, report.bad_records) == (3, [])
    embedder = Embedder(settings)
    assert np.linalg.norm(embedder.embed(["a", "b c"]), axis=1) == pytest.approx(1.0, abs=1e-5)
    questions = [
        "Which sea does the river reach?",
        "When was the landmark in France built?",
        "How do leaves make food?",
    ]
    results = Retriever(settings, embedder).search("c", questions, 1)
    assert [hits[0].document_id for hits in results] == ["nile", "eiffel", "photosynthesis"]
    tokenizer = load_tokenizer(settings)
    assert all(tokenizer.decode(hits[0].token_ids) == hits[0].text for hits in results)
    again = ingest([str(tmp_path / "a.jsonl")], "c", settings)
    assert (again.unchanged, again.generation) == (3, report.generation)
