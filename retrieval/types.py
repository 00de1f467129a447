# SPDX-License-Identifier: Apache-2.0
"""What retrieval hands on."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CHUNK_ID = 256
"""Characters of the longest chunk id."""
MAX_DOCUMENT_ID = MAX_CHUNK_ID - 16
"""Characters of the longest document id: a chunk id is that, `#` and the chunk's number in the document."""


@dataclass(frozen=True)
class RetrievedChunk:
    """A chunk of the corpus, found for a query.

    Attributes:
        chunk_id: stable id, unique in its corpus.
        document_id: id of the document it was cut from.
        title: title of the document, may be empty.
        text: the chunk's text.
        token_ids: target-tokenizer ids of that text, as cut at ingest.
        source: where the document was read from.
        score: inner product of normalised vectors, or the fused score; higher is better.
    """

    chunk_id: str
    document_id: str
    title: str
    text: str
    token_ids: tuple[int, ...]
    source: str
    score: float
