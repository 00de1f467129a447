# SPDX-License-Identifier: Apache-2.0
"""What a generation says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from kvcache.settings import RetrievalSettings
from retrieval.errors import CorpusMismatchError


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """Digest (hex) and size of one file."""

    sha256: str
    bytes: int


class IndexRecord(_Record):
    """How the index was built."""

    kind: Literal["flat", "ivf", "hnsw"]
    ivf_nlist: int
    hnsw_m: int

    @classmethod
    def of(cls, settings: RetrievalSettings) -> IndexRecord:
        """What an index built under these settings would be."""
        return cls(kind=settings.index, ivf_nlist=settings.ivf_nlist, hnsw_m=settings.hnsw_m)


class Owner(_Record):
    """What a corpus belongs to: its ids mean nothing to another tokenizer, its vectors nothing to another embedder."""

    target_model: str
    """The target's name in the settings, for messages."""
    tokenizer_digest: str
    embedding_model: str
    """Identity of the embedding model, content included."""
    embedding_dimension: int

    def check(self, corpus: str, mine: Owner) -> None:
        """Compare what a corpus belongs to with `mine`, what the settings name.

        Raises:
            CorpusMismatchError: they differ; both are named.
        """
        if self.tokenizer_digest != mine.tokenizer_digest:
            raise CorpusMismatchError(
                f"corpus {corpus!r} was cut with the tokenizer of target {self.target_model!r} "
                f"({self.tokenizer_digest}), but target.model {mine.target_model!r} has {mine.tokenizer_digest}: "
                "set the target it was made for, or ingest again, replacing the corpus"
            )
        if self.embedding_model != mine.embedding_model:
            raise CorpusMismatchError(
                f"corpus {corpus!r} was embedded with {self.embedding_model}, but embedding.model is "
                f"{mine.embedding_model}: set the model it was made with, or ingest again, replacing the corpus"
            )


class Manifest(_Record):
    """Everything about a generation that its files do not say."""

    format_version: Literal[1] = 1
    corpus: str
    generation: str
    files: dict[str, FileRecord]
    owner: Owner
    index: IndexRecord
    documents: int
    chunks: int
    tokens: int


@dataclass(frozen=True)
class Pointer:
    """Content of `CURRENT`."""

    generation: str
    manifest_sha256: str

    def to_bytes(self) -> bytes:
        """As it is written."""
        return f"{self.generation} {self.manifest_sha256}\n".encode()
