# SPDX-License-Identifier: Apache-2.0
"""The Retriever deployment without Serve: who waits for whom."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

import retrieval.corpus
import retrieval.embedding
import retrieval.retriever
from kvcache.settings import load_settings
from retrieval.errors import UnknownCorpusError
from retrieval.retriever import SearchResult
from retrieval.types import RetrievedChunk
from serve_app.messages import RetrieveRequest, RetrieveResult
from serve_app.retriever import RetrieverDeployment


class FakeRetriever:
    """Has `warm` in memory, and reads `cold` for as long as it is told to."""

    def __init__(self, *_: object) -> None:
        self.served: set[str] = set()
        self.begun, self.go = threading.Event(), threading.Event()
        self.reads: Counter[str] = Counter()

    def serves(self, corpus: str) -> bool:
        return corpus in self.served

    def generation(self, corpus: str) -> str:
        if corpus not in self.served:
            self.reads[corpus] += 1
            if corpus == "cold":
                self.begun.set()
                assert self.go.wait(30)
            elif corpus != "warm":
                raise UnknownCorpusError(f"unknown corpus {corpus!r}")
            self.served.add(corpus)
        return "1"

    def query(self, corpus: str, queries: list[str], top_k: int) -> SearchResult:
        generation = self.generation(corpus)
        chunk = RetrievedChunk("a#00000", "a", "", corpus, (1,), "here", 1.0)
        return SearchResult(generation, [[chunk] for _ in queries])

    def close(self) -> None:
        pass


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> RetrieverDeployment:
    monkeypatch.setattr(retrieval.retriever, "Retriever", FakeRetriever)
    monkeypatch.setattr(retrieval.embedding, "Embedder", lambda settings: None)
    monkeypatch.setattr(retrieval.corpus, "list_corpora", lambda uri: ["warm"])
    return RetrieverDeployment(load_settings())


def ask(deployment: RetrieverDeployment, corpus: str) -> asyncio.Task[RetrieveResult]:
    return asyncio.create_task(deployment.retrieve(RetrieveRequest(corpus=corpus, query="fox", top_k=1)))


async def test_a_corpus_that_is_being_read_holds_up_no_other(deployment: RetrieverDeployment) -> None:
    fake = deployment._retriever
    try:
        cold = [ask(deployment, "cold") for _ in range(20)]
        assert await asyncio.to_thread(fake.begun.wait, 10)
        async with asyncio.timeout(10):
            assert (await ask(deployment, "warm")).chunks[0].text == "warm"
            with pytest.raises(UnknownCorpusError):
                await ask(deployment, "nowhere")
            await deployment.ready()
            cold[0].cancel()  # the first to ask leaves: the others get their answer
            await asyncio.sleep(0)
    finally:
        fake.go.set()
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*cold, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert [answer.chunks[0].text for answer in answers[1:]] == ["cold"] * 19
    assert fake.reads == {"warm": 1, "cold": 1, "nowhere": 1}
    assert not deployment._loading
