# SPDX-License-Identifier: Apache-2.0
"""Text embeddings: unit-length float32 vectors from a sentence-transformers model."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from kvcache.models import model_path
from kvcache.settings import Settings

_IDENTITY_SUFFIXES = {".json", ".safetensors", ".bin", ".txt", ".model"}


class TextEmbedder(Protocol):
    """What retrieval asks of an embedding model."""

    identity: str
    """Names the model and its exact content; vectors of different identities are never compared."""
    dimension: int
    """Size `E` of a vector."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts: float32 `[N, E]`, unit length."""
        ...


class Embedder:
    """A sentence-transformers model. Safe to call from several threads.

    Raises:
        ModelNotFoundError: a bare model name that has not been fetched.
    """

    def __init__(self, settings: Settings) -> None:
        from sentence_transformers import SentenceTransformer  # takes seconds: only those who embed pay

        path = model_path(settings.embedding.model, settings)
        device = None if settings.embedding.device == "auto" else settings.embedding.device
        self._model = SentenceTransformer(path, device=device, local_files_only=Path(path).is_dir())
        self._batch_size = settings.embedding.batch_size
        self._lock = threading.Lock()  # a fast tokenizer that pads refuses to be used by two threads at once
        self.identity = _directory_identity(Path(path)) if Path(path).is_dir() else self._hub_identity(path)
        self.dimension: int = self._model.get_embedding_dimension()

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts: float32 `[N, E]`, unit length."""
        if not texts:
            return np.empty((0, self.dimension), dtype=np.float32)
        with self._lock:
            return self._model.encode(
                list(texts), batch_size=self._batch_size, normalize_embeddings=True, show_progress_bar=False
            ).astype(np.float32, copy=False)

    def _hub_identity(self, hub_id: str) -> str:
        return f"{hub_id}@{self._model[0].auto_model.config._commit_hash}"


def _directory_identity(directory: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(directory.rglob("*")):
        if file.is_file() and file.suffix in _IDENTITY_SUFFIXES:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{file.relative_to(directory).as_posix()}\n{content}\n".encode())
    return f"{directory.name}@{digest.hexdigest()[:16]}"
