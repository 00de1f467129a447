# SPDX-License-Identifier: Apache-2.0
"""Generations: visible in one step, checked before use, collected when nobody needs them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kvcache.settings import Settings
from retrieval.corpus import Corpus, list_corpora, table_schema
from retrieval.errors import CorpusConflictError, CorpusIntegrityError, UnknownChunkError, UnknownCorpusError
from retrieval.publish import publish
from tests.retrieval.conftest import Publish

TEXTS = {"b": "the quick fox", "a": "the lazy dog", "a#00001": "a second chunk"}


def folder_of(settings: Settings, corpus: str = "c") -> Path:
    root = Path(settings.corpora_uri) / corpus
    return root / "generations" / (root / "CURRENT").read_text().split()[0]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_generation_holds_the_table_by_chunk_id_and_its_counts(settings: Settings, put: Publish) -> None:
    manifest = put(TEXTS)
    corpus = Corpus.open(settings.corpora_uri, "c", index_settings=settings.retrieval)
    assert corpus.manifest == manifest
    assert corpus.table["chunk_id"].to_pylist() == ["a#00000", "a#00001", "b#00000"]
    assert corpus.index.size == 3
    assert (manifest.documents, manifest.chunks) == (2, 3)
    assert manifest.tokens == sum(map(len, corpus.table["token_ids"].to_pylist()))
    assert "embedding" not in corpus.table.column_names


def test_chunks_are_found_by_id_in_the_order_asked(settings: Settings, put: Publish) -> None:
    put(TEXTS)
    corpus = Corpus.open(settings.corpora_uri, "c")
    rows = corpus.rows_of(["b#00000", "a#00000", "b#00000"])
    assert [chunk.text for chunk in corpus.chunks_at(rows, [0, 0, 0])] == [TEXTS["b"], TEXTS["a"], TEXTS["b"]]
    assert corpus.rows_of([]) == []
    for unknown in ("zzz", "a", "", "b#00000 "):
        with pytest.raises(UnknownChunkError, match=rf"no chunk '{unknown}'") as error:
            corpus.rows_of(["a#00000", unknown])
        assert "a#00001" in str(error.value)


@pytest.mark.parametrize("name", ["nope", "..", "c/../c", "", "c\n", "/etc", "x" * 101])
def test_an_unknown_corpus_is_refused_and_the_known_are_named(settings: Settings, put: Publish, name: str) -> None:
    put(TEXTS), put(TEXTS, corpus="second")
    assert list_corpora(settings.corpora_uri) == ["c", "second"]
    with pytest.raises(UnknownCorpusError, match="known: 'c', 'second'"):
        Corpus.open(settings.corpora_uri, name)


def test_without_any_corpus_the_message_says_what_to_do(settings: Settings) -> None:
    assert list_corpora(settings.corpora_uri) == []
    with pytest.raises(UnknownCorpusError, match="cachemend ingest"):
        Corpus.open(settings.corpora_uri, "c")


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "x" * 101])
def test_a_corpus_cannot_get_a_name_that_leads_elsewhere(put: Publish, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be called"):
        put(TEXTS, corpus=name)


@pytest.mark.parametrize("file", ["manifest.json", "chunks.parquet", "index.faiss"])
def test_any_flipped_byte_is_refused_naming_the_file(settings: Settings, put: Publish, file: str) -> None:
    put(TEXTS)
    path = folder_of(settings) / file
    size = path.stat().st_size
    for at in {0, 1, size // 3, size // 2, size - 5, size - 1}:
        flip(path, at)
        with pytest.raises(CorpusIntegrityError, match=file):
            Corpus.open(settings.corpora_uri, "c", index_settings=settings.retrieval)
        flip(path, at)
    Corpus.open(settings.corpora_uri, "c", index_settings=settings.retrieval)


@pytest.mark.parametrize("file", ["manifest.json", "chunks.parquet", "index.faiss"])
def test_a_truncated_or_missing_file_is_refused_naming_it(settings: Settings, put: Publish, file: str) -> None:
    put(TEXTS)
    path = folder_of(settings) / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorpusIntegrityError, match=file):
        Corpus.open(settings.corpora_uri, "c", index_settings=settings.retrieval)
    path.unlink()
    with pytest.raises(CorpusIntegrityError, match=rf"{file} is missing"):
        Corpus.open(settings.corpora_uri, "c", index_settings=settings.retrieval)


def test_every_flipped_byte_of_the_pointer_is_refused(settings: Settings, put: Publish) -> None:
    put(TEXTS)
    path = Path(settings.corpora_uri) / "c" / "CURRENT"
    for at in range(path.stat().st_size):
        flip(path, at)
        with pytest.raises(CorpusIntegrityError, match=r"CURRENT|manifest\.json"):
            Corpus.open(settings.corpora_uri, "c")
        flip(path, at)


def test_files_swapped_between_generations_are_refused(settings: Settings, put: Publish) -> None:
    put(TEXTS)
    old = folder_of(settings)
    put({"b": "the slow fox", "a": "the busy dog", "a#00001": "a third chunk"})
    (folder_of(settings) / "index.faiss").write_bytes((old / "index.faiss").read_bytes())
    with pytest.raises(CorpusIntegrityError, match=r"index\.faiss"):
        Corpus.open(settings.corpora_uri, "c", index_settings=settings.retrieval)


def test_a_manifest_of_another_format_is_refused(settings: Settings, put: Publish) -> None:
    put(TEXTS)
    path = folder_of(settings) / "manifest.json"
    data = json.dumps({**json.loads(path.read_text()), "format_version": 2}).encode()
    path.write_bytes(data)
    pointer = f"{folder_of(settings).name} {hashlib.sha256(data).hexdigest()}\n"
    (Path(settings.corpora_uri) / "c" / "CURRENT").write_text(pointer)
    with pytest.raises(CorpusIntegrityError, match="format_version"):
        Corpus.open(settings.corpora_uri, "c")


def test_generations_are_numbered_and_all_but_the_last_two_collected(settings: Settings, put: Publish) -> None:
    generations = [put({"a": f"text {i}"}).generation for i in range(5)]
    assert [int(generation.split("-")[0]) for generation in generations] == [1, 2, 3, 4, 5]
    left = sorted(path.name for path in (Path(settings.corpora_uri) / "c" / "generations").iterdir())
    assert left == generations[-2:]


def test_a_run_that_died_halfway_leaves_nothing_visible_and_is_cleared_up(settings: Settings, put: Publish) -> None:
    first = put(TEXTS)
    half = Path(settings.corpora_uri) / "c" / "generations" / "000002-deadbeef"
    half.mkdir()
    (half / "chunks.parquet").write_bytes(b"half")
    assert Corpus.open(settings.corpora_uri, "c").generation == first.generation
    assert put({"a": "x"}).generation.startswith("000003-")
    assert not half.exists()


def test_a_writer_that_was_overtaken_publishes_nothing(settings: Settings, put: Publish) -> None:
    first, second = put({"a": "one"}), put({"a": "two"})
    table = Corpus.open(settings.corpora_uri, "c", columns=table_schema(1).names).table
    with pytest.raises(CorpusConflictError, match=second.generation):
        publish(settings.corpora_uri, "c", table, first.owner, settings.retrieval, based_on=first.generation)
    corpus = Corpus.open(settings.corpora_uri, "c")
    assert corpus.generation == second.generation
    left = sorted(path.name for path in (Path(settings.corpora_uri) / "c" / "generations").iterdir())
    assert left == [first.generation, second.generation]
