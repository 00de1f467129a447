# SPDX-License-Identifier: Apache-2.0
"""A chunk's KV cache and its identity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

FORMAT_VERSION = 1
"""Version of the chunk-cache object; part of every key."""


@dataclass(frozen=True)
class ChunkKV:
    """Stale KV of one chunk: computed with the chunk alone.

    Attributes:
        token_ids: target-tokenizer ids, `T` of them.
        k: canonical keys (rotary undone) `[L, T, H, D]`.
        v: values `[L, T, H, D]`.
    """

    token_ids: tuple[int, ...]
    k: torch.Tensor
    v: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return self.k.nbytes + self.v.nbytes


def token_digest(token_ids: Sequence[int]) -> str:
    """SHA-256, lower-case hex, over the ids as little-endian int64."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()


def chunk_key(fingerprint: str, token_ids: Sequence[int]) -> str:
    """Name of a chunk's cache object: SHA-256 over format version, target fingerprint and token ids."""
    digest = hashlib.sha256(f"cachemend-chunk-v{FORMAT_VERSION}\n{fingerprint}\n".encode())
    digest.update(np.asarray(token_ids, dtype="<i8").tobytes())
    return digest.hexdigest()
