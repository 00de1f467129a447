# SPDX-License-Identifier: Apache-2.0
"""A tiny tokenizer, and corpora published without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.settings import Settings
from kvcache.target import load_tokenizer
from retrieval.corpus import table_schema
from retrieval.manifest import Manifest
from retrieval.publish import current_generation, publish
from retrieval.retriever import owner_of
from tests.retrieval.fakes import HashingEmbedder
from tests.tiny import tiny_model_dir, tiny_settings

Publish = Callable[..., Manifest]


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny target."""
    return tiny_model_dir(tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture(scope="session")
def tokenizer(target_dir: Path) -> PreTrainedTokenizerBase:
    """The tiny target's tokenizer."""
    return load_tokenizer(tiny_settings(target_dir))


@pytest.fixture
def settings(target_dir: Path, tmp_path: Path) -> Settings:
    """Settings of the tiny target, with corpora below the test's folder."""
    return tiny_settings(target_dir).model_copy(update={"root": str(tmp_path / "data")})


@pytest.fixture
def put(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Publish:
    """Publish a corpus of one-chunk documents: `put({"doc": "text"}, corpus="c")`."""

    def put(
        texts: Mapping[str, str], corpus: str = "c", settings: Settings = settings, embedder: type = HashingEmbedder
    ) -> Manifest:
        owner = owner_of(settings, embedder())
        vectors = embedder().embed(list(texts.values()))
        rows = [
            {
                "chunk_id": f"{document}#00000" if "#" not in document else document,
                "document_id": document.partition("#")[0],
                "title": "",
                "text": text,
                "token_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
                "source": "here",
                "content_hash": text,
                "embedding": vector.tolist(),
            }
            for (document, text), vector in zip(texts.items(), vectors, strict=True)
        ]
        table = pa.Table.from_pylist(rows, table_schema(owner.embedding_dimension))
        based_on = current_generation(settings.corpora_uri, corpus)
        return publish(settings.corpora_uri, corpus, table, owner, settings.retrieval, based_on)

    return put
