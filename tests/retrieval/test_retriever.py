# SPDX-License-Identifier: Apache-2.0
"""What a search finds, in which generation, and what is refused."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvcache.objects import ObjectStore
from kvcache.settings import Settings
from kvcache.target import load_tokenizer
from retrieval.chunking import tokenizer_digest
from retrieval.corpus import Corpus
from retrieval.errors import CorpusIntegrityError, CorpusMismatchError, UnknownChunkError, UnknownCorpusError
from retrieval.retriever import POLL_S, Retriever
from tests.retrieval.conftest import Publish
from tests.retrieval.fakes import HashingEmbedder, OtherEmbedder
from tests.retrieval.test_corpus import flip, folder_of
from tests.tiny import tiny_model_dir

TEXTS = {
    "fox": "the quick brown fox jumps",
    "dog": "the lazy dog sleeps",
    "paris": "paris is the capital of france",
    "rome": "rome is the capital of italy",
}


@pytest.fixture
def retriever(settings: Settings) -> Retriever:
    retriever = Retriever(settings, HashingEmbedder())
    yield retriever
    retriever.close()


def with_retrieval(settings: Settings, **values: object) -> Settings:
    return settings.model_copy(update={"retrieval": settings.retrieval.model_copy(update=values)})


def test_finds_what_the_vectors_say(settings: Settings, put: Publish, retriever: Retriever) -> None:
    put(TEXTS)
    queries = ["capital of france", "quick fox", "dog"]
    vectors, by_text = HashingEmbedder().embed(list(TEXTS.values())), list(TEXTS.values())
    for query, hits in zip(queries, retriever.search("c", queries, 3), strict=True):
        scores = vectors @ HashingEmbedder().embed([query])[0]
        assert [hit.text for hit in hits] == [by_text[row] for row in np.argsort(-scores)[:3]]
        assert [hit.score for hit in hits] == pytest.approx(np.sort(scores)[::-1][:3].tolist(), abs=1e-6)
    best = retriever.search("c", queries, 1)[0][0]
    assert (best.chunk_id, best.document_id, best.source, best.title) == ("paris#00000", "paris", "here", "")
    assert best.token_ids == tuple(load_tokenizer(settings)(best.text, add_special_tokens=False)["input_ids"])
    assert all(type(token) is int for token in best.token_ids)
    assert retriever.search("c", [], 3) == []


def test_top_k_is_bounded_by_the_corpus_and_refused_below_one(put: Publish, retriever: Retriever) -> None:
    put(TEXTS)
    assert len(retriever.search("c", ["the"], 10**9)[0]) == len(TEXTS)
    for top_k in (0, -1):
        with pytest.raises(ValueError, match=f"top_k is {top_k}"):
            retriever.search("c", ["the"], top_k)


def test_equal_scores_come_in_the_order_of_chunk_ids(put: Publish, retriever: Retriever) -> None:
    names = [f"d{i:03d}" for i in np.random.default_rng(0).permutation(300)]
    put({name: "the same text" for name in names} | {"best": "needle"})
    for top_k in (1, 7, 100):
        hits = retriever.search("c", ["the same text"], top_k)[0]
        assert [hit.document_id for hit in hits] == sorted(names)[:top_k]


def test_at_most_n_chunks_of_one_document(settings: Settings, put: Publish) -> None:
    put({f"big#{i:05d}": "fox fox fox" for i in range(200)} | {"small": "fox and dog", "far": "nothing"})
    everything = Retriever(settings, HashingEmbedder()).search("c", ["fox"], 5)[0]
    assert {hit.document_id for hit in everything} == {"big"}
    limited = Retriever(with_retrieval(settings, max_per_document=2), HashingEmbedder())
    found = [hit.chunk_id for hit in limited.search("c", ["fox"], 4)[0]]
    assert found == ["big#00000", "big#00001", "small#00000", "far#00000"]
    assert len(limited.search("c", ["fox"], 50)[0]) == 4


def test_hybrid_fuses_both_rankings_by_reciprocal_rank(settings: Settings, put: Publish) -> None:
    put(TEXTS | {"odd": "zyzzyva"})
    query = "zyzzyva capital"
    dense = [hit.document_id for hit in Retriever(settings, HashingEmbedder()).search("c", [query], 5)[0]]
    # BM25: the rare word first, then both capitals, equal in length and words, by id.
    lexical = ["odd", "paris", "rome"]
    expected = {name: 1 / (60 + dense.index(name) + 1) for name in dense}
    for rank, name in enumerate(lexical, start=1):
        expected[name] += 1 / (60 + rank)
    hits = Retriever(with_retrieval(settings, hybrid=True), HashingEmbedder()).search("c", [query], 5)[0]
    assert {hit.document_id: hit.score for hit in hits} == pytest.approx(expected)
    assert [hit.document_id for hit in hits] == sorted(expected, key=lambda name: (-expected[name], name))


def test_asking_for_more_does_not_reorder_a_hybrid_result(settings: Settings, put: Publish) -> None:
    words = ["fox", "dog", "paris", "rome", "the", "of"]
    rng = np.random.default_rng(0)
    put({f"d{i:02d}": " ".join(rng.choice(words, 5)) for i in range(80)})
    retriever = Retriever(with_retrieval(settings, hybrid=True), HashingEmbedder())
    ten = [hit.chunk_id for hit in retriever.search("c", ["fox of rome"], 10)[0]]
    assert [hit.chunk_id for hit in retriever.search("c", ["fox of rome"], 3)[0]] == ten[:3]


def test_lookup_keeps_the_order_and_names_what_is_unknown(put: Publish, retriever: Retriever) -> None:
    put(TEXTS)
    assert [hit.document_id for hit in retriever.lookup("c", ["rome#00000", "dog#00000"]).hits[0]] == ["rome", "dog"]
    with pytest.raises(UnknownChunkError, match=r"no chunk 'x', 'y'"):
        retriever.lookup("c", ["x", "dog#00000", "y"])
    with pytest.raises(UnknownCorpusError, match="known: 'c'"):
        retriever.lookup("d", ["x"])


def test_a_corpus_of_another_embedding_model_is_refused_naming_both(settings: Settings, put: Publish) -> None:
    put(TEXTS)
    with pytest.raises(CorpusMismatchError, match=r"hashing-embedder@1.*other-embedder@1"):
        Retriever(settings, OtherEmbedder()).search("c", ["x"], 1)


def test_a_corpus_of_another_tokenizer_is_refused_naming_both(settings: Settings, put: Publish, tmp_path: Path) -> None:
    put(TEXTS)
    directory = tiny_model_dir(tmp_path / "other")
    target = settings.target.model_copy(update={"model": str(directory)})
    other = settings.model_copy(update={"target": target})
    tokenizer = load_tokenizer(other)
    assert Retriever(other, HashingEmbedder()).search("c", ["dog"], 1)  # another directory, the same tokenizer
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(directory)
    both = f"{tokenizer_digest(load_tokenizer(settings))}.*{tokenizer_digest(load_tokenizer(other))}"
    with pytest.raises(CorpusMismatchError, match=both):
        Retriever(other, HashingEmbedder()).search("c", ["x"], 1)


def test_a_new_generation_is_picked_up_without_being_asked(put: Publish, retriever: Retriever) -> None:
    first = put(TEXTS)
    assert retriever.query("c", ["fox"], 1).generation == first.generation
    second = put({"new": "entirely new fox"})
    deadline = time.monotonic() + POLL_S + 5
    while retriever.generation("c") != second.generation and time.monotonic() < deadline:
        time.sleep(0.05)
    result = retriever.query("c", ["fox"], 5)
    assert result.generation == second.generation
    assert [hit.document_id for hit in result.hits[0]] == ["new"]


def test_a_damaged_newer_generation_is_not_taken_and_reported_once(
    settings: Settings, put: Publish, retriever: Retriever, caplog: pytest.LogCaptureFixture
) -> None:
    retriever.close()  # only this test looks for generations
    first = put(TEXTS)
    retriever.search("c", ["fox"], 1)
    put({"new": "fox"})
    flip(folder_of(settings) / "index.faiss", 40)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            retriever.refresh()
    assert retriever.generation("c") == first.generation
    assert len(retriever.search("c", ["fox"], 10)[0]) == len(TEXTS)
    (record,) = caplog.records
    assert "index.faiss" in record.getMessage() and first.generation in record.getMessage()
    with pytest.raises(CorpusIntegrityError, match=r"index\.faiss"):
        Retriever(settings, HashingEmbedder()).search("c", ["fox"], 1)
    third = put({"new": "fox"})
    retriever.refresh()
    assert retriever.generation("c") == third.generation


def test_a_removed_corpus_is_no_longer_served(settings: Settings, put: Publish, retriever: Retriever) -> None:
    put(TEXTS), put(TEXTS, corpus="other")
    retriever.search("c", ["fox"], 1)
    (Path(settings.corpora_uri) / "c" / "CURRENT").unlink()
    retriever.refresh()
    with pytest.raises(UnknownCorpusError, match="known: 'other'"):
        retriever.search("c", ["fox"], 1)


class SlowOpen:
    """`Corpus.open`, held up for one corpus until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._open, self._name = Corpus.open, name
        monkeypatch.setattr(Corpus, "open", self)

    def __call__(self, corpora_uri: str, name: str, **options: object) -> Corpus:
        if name == self._name:
            self.begun.set()
            assert self.go.wait(30)
        return self._open(corpora_uri, name, **options)


def within(seconds: float, work: Callable[[], object]) -> object:
    """What a call returns, if it returns in time."""
    return ThreadPoolExecutor(1).submit(work).result(seconds)


def test_reading_one_corpus_holds_up_no_other(
    put: Publish, retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever.close()  # only this test looks for generations
    for corpus in ("slow", "loaded", "cold"):
        put(TEXTS, corpus=corpus)
    retriever.search("slow", ["fox"], 1), retriever.search("loaded", ["fox"], 1)
    old, new = retriever.generation("slow"), put({"new": "fox"}, corpus="slow").generation
    slow = SlowOpen(monkeypatch, "slow")
    with ThreadPoolExecutor(1) as pool:
        refreshing = pool.submit(retriever.refresh)
        try:
            assert slow.begun.wait(10)
            for corpus in ("loaded", "cold"):
                assert within(10, lambda name=corpus: retriever.search(name, ["fox"], 1))[0][0].document_id == "fox"
            with pytest.raises(UnknownCorpusError):
                within(10, lambda: retriever.search("nowhere", ["fox"], 1))
            assert retriever.generation("slow") == old
        finally:
            slow.go.set()
        refreshing.result(10)
    assert retriever.generation("slow") == new


def test_a_corpus_is_read_once_however_many_ask_first(
    put: Publish, retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(TEXTS)
    opened, open_corpus = [], Corpus.open

    def counting(*args: object, **options: object) -> Corpus:
        opened.append(args)
        time.sleep(0.1)
        return open_corpus(*args, **options)

    monkeypatch.setattr(Corpus, "open", counting)
    assert not retriever.serves("c")
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(retriever.generation, ["c"] * 8))) == 1
    assert len(opened) == 1 and retriever.serves("c")


def test_unknown_corpora_cost_few_listings_and_leave_nothing(
    put: Publish, retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(TEXTS)
    calls: list[str] = []
    for name in ("folders", "list"):
        whole = getattr(ObjectStore, name)
        monkeypatch.setattr(
            ObjectStore, name, lambda *args, name=name, whole=whole: (calls.append(name), whole(*args))[1]
        )
    started = time.monotonic()
    for number in range(100):
        with pytest.raises(UnknownCorpusError, match="known: 'c'"):
            retriever.search(f"nowhere{number}", ["fox"], 1)
    assert set(calls) == {"folders"} and len(calls) <= 2 + (time.monotonic() - started) / 1.0
    assert not retriever._loading and not retriever.serves("nowhere0")
    put(TEXTS, corpus="nowhere0")
    assert retriever.search("nowhere0", ["fox"], 1)  # the memory of the listing is for the message only


def test_readers_see_one_generation_each_while_five_are_published(settings: Settings, put: Publish) -> None:
    def content(version: int) -> dict[str, str]:
        return {f"doc{i}": f"fox version{version} number{i}" for i in range(20 + version)}

    versions = {put(content(0)).generation: 0}
    retriever = Retriever(settings, HashingEmbedder())
    results, errors, done = [], [], threading.Event()

    def read(fresh: bool) -> None:
        try:
            while not done.is_set():
                reader = Retriever(settings, HashingEmbedder()) if fresh else retriever
                results.append(reader.query("c", ["fox version", "number3"], 30))
                reader.lookup("c", ["doc3#00000"])
                if fresh:
                    reader.close()
        except Exception as error:
            errors.append(error)

    def follow() -> None:
        while not done.is_set():
            retriever.refresh()

    threads = [threading.Thread(target=read, args=(fresh,)) for fresh in (False, False, True)]
    threads.append(threading.Thread(target=follow))
    for thread in threads:
        thread.start()
    for version in range(1, 6):
        newest = put(content(version)).generation
        versions[newest] = version
        deadline = time.monotonic() + 60
        while not errors and all(result.generation != newest for result in results) and time.monotonic() < deadline:
            time.sleep(0.05)
    done.set()
    for thread in threads:
        thread.join()
    retriever.refresh()

    assert errors == []
    seen = set()
    for result in results:
        version = versions[result.generation]
        seen.add(version)
        expected = set(content(version).values())
        for hits in result.hits:
            assert {hit.text for hit in hits} == expected
    assert seen >= {1, 2, 3, 4, 5}
    assert versions[retriever.generation("c")] == 5
    retriever.close()


def test_a_retriever_that_nobody_holds_is_not_kept_by_its_thread(settings: Settings, put: Publish) -> None:
    put(TEXTS)
    before = set(threading.enumerate())
    retriever = Retriever(settings, HashingEmbedder())
    (watcher,) = (each for each in set(threading.enumerate()) - before if each.name == "corpus-generations")
    retriever.search("c", ["fox"], 1)
    gone = weakref.ref(retriever)
    del retriever
    gc.collect()
    deadline = time.monotonic() + POLL_S + 5
    while watcher.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone() is None and not watcher.is_alive()
