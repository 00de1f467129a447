# SPDX-License-Identifier: Apache-2.0
"""Corpora made of given token ids, without an ingest run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from kvcache.settings import Settings
from kvcache.target import load_tokenizer
from retrieval.chunking import tokenizer_digest
from retrieval.corpus import table_schema
from retrieval.manifest import Owner
from retrieval.publish import publish


def publish_corpus(settings: Settings, name: str, chunks: Sequence[Sequence[int]], **owner: str) -> None:
    """Publish a corpus of those chunks for the settings' target; `owner` overrides what it belongs to."""
    size = len(chunks)
    vectors = np.eye(8, dtype=np.float32)[np.arange(size) % 8]
    table = pa.table(
        {
            "chunk_id": [f"doc#{row:05d}" for row in range(size)],
            "document_id": ["doc"] * size,
            "title": [""] * size,
            "text": ["text"] * size,
            "token_ids": pa.array([list(ids) for ids in chunks], pa.list_(pa.int32())),
            "source": ["source"] * size,
            "content_hash": ["hash"] * size,
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 8),
        }
    )
    belongs_to = {
        "target_model": settings.target.model,
        "tokenizer_digest": tokenizer_digest(load_tokenizer(settings)),
        "embedding_model": "none",
        **owner,
    }
    owner_record = Owner(embedding_dimension=8, **belongs_to)
    publish(settings.corpora_uri, name, table.cast(table_schema(8)), owner_record, settings.retrieval, based_on=None)
