# SPDX-License-Identifier: Apache-2.0
"""A named fake embedding model: words hashed into a unit vector, so that shared words make texts similar."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from kvcache.settings import Settings

DIMENSION = 64


class HashingEmbedder:
    """Bag of words by hashing; deterministic, no model."""

    identity = "hashing-embedder@1"
    dimension = DIMENSION

    def __init__(self, settings: Settings | None = None) -> None:
        pass

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 `[N, 64]`."""
        vectors = np.zeros((len(texts), DIMENSION), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()) or [""]:
                digest = hashlib.sha256(word.encode()).digest()
                vector[digest[0] % DIMENSION] += 1.0 if digest[1] % 2 else -1.0
            vector[-1] += 0.01  # words that cancel out must not leave a zero vector
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class NegatedEmbedder(HashingEmbedder):
    """Claims to be the same model and points the other way: shows which vectors a run computed anew."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 `[N, 64]`."""
        return -super().embed(texts)


class OtherEmbedder(HashingEmbedder):
    """The same vectors under another model's name."""

    identity = "other-embedder@1"
