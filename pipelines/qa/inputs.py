# SPDX-License-Identifier: Apache-2.0
"""The fixed inputs of CacheRepair's published evaluation (methods, section 3.8): caps per chunk, and windows.

Published numbers were made with the Qwen2.5-3B tokenizer's ids for both Qwen sizes, and for Llama with the texts of
those ids tokenised again; here every target's own tokenizer cuts, so that inputs of different targets differ by a few
words at the chunks' ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.prompt import plain_ids
from pipelines.qa.dataset import QARow

MAX_CHUNKS = 20
MAX_TOKENS = 4096
WINDOWS = 20


def fixed_chunks(
    row: QARow, tokenizer: PreTrainedTokenizerBase, max_chunks: int = MAX_CHUNKS, max_tokens: int = MAX_TOKENS
) -> list[tuple[int, ...]]:
    """Token ids of the row's own chunks, capped: each of `C` chunks keeps its first floor(max_tokens / C) ids.

    Args:
        row: with chunks.
        tokenizer: the target's.
        max_chunks: chunks kept, the first ones.
        max_tokens: of all chunks together.

    Raises:
        ValueError: the row has no chunks, or there are fewer tokens than chunks.
    """
    if row.chunks is None:
        raise ValueError(f"{row.id}: the row has no chunks of its own")
    return capped([plain_ids(tokenizer, text) for text in row.chunks[:max_chunks]], max_tokens)


def capped(chunks: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS) -> list[tuple[int, ...]]:
    """The first floor(max_tokens / number of chunks) ids of each chunk.

    Raises:
        ValueError: that is none.
    """
    budget = max_tokens // max(1, len(chunks))
    if budget < 1:
        raise ValueError(f"{max_tokens} tokens are not enough for {len(chunks)} chunks")
    return [tuple(ids[:budget]) for ids in chunks]


def recut(chunks: Sequence[Sequence[int]], windows: int = WINDOWS) -> list[tuple[int, ...]]:
    """The same ids in equal contiguous windows, so that borders fall anywhere; the first ones take the remainder.

    Published inputs of MultiHop-RAG and TriviaQA are these. Fewer ids than windows make a window of each.
    """
    flat = [token for ids in chunks for token in ids]
    size, longer = divmod(len(flat), windows)
    starts = [i * size + min(i, longer) for i in range(windows + 1)]
    return [tuple(flat[a:b]) for a, b in pairwise(starts) if a < b]
