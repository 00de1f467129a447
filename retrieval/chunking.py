# SPDX-License-Identifier: Apache-2.0
"""Documents become chunks: cut in token ids of the target's tokenizer, which are never tokenised again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.settings import ChunkingSettings

_STATEFUL = ("truncation", "padding")  # a call with padding=True leaves its mark on a fast tokenizer's description


class ChunkingError(ValueError):
    """The chunking settings or the tokenizer cannot be used."""


@dataclass(frozen=True)
class TextChunk:
    """A piece of a document.

    Attributes:
        text: title line and body slice, as in the document.
        token_ids: ids of that text; a character whose tokens a cut separates is in the text on both sides.
    """

    text: str
    token_ids: tuple[int, ...]


class Chunker:
    """Cuts documents into chunks of at most `max_tokens` ids that overlap by `overlap_tokens` ids.

    Every chunk of a titled document starts with the title line's ids, so title ids count in `max_tokens`; they are
    not part of the overlap. A title may take half of what the overlap leaves; the rest of a longer one is dropped.

    Raises:
        ChunkingError: the overlap is not smaller than the chunk, or the tokenizer gives no character offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ChunkingSettings) -> None:
        if settings.overlap_tokens >= settings.max_tokens:
            raise ChunkingError(
                f"chunking.overlap_tokens ({settings.overlap_tokens}) must be smaller than "
                f"chunking.max_tokens ({settings.max_tokens})"
            )
        if not tokenizer.is_fast:
            raise ChunkingError(f"{type(tokenizer).__name__} gives no character offsets: a fast tokenizer is needed")
        self._tokenizer = tokenizer
        self._max = settings.max_tokens
        self._overlap = settings.overlap_tokens
        self._title_limit = (settings.max_tokens - settings.overlap_tokens) // 2

    def chunks(self, title: str, body: str) -> list[TextChunk]:
        """Cut one document; a body without tokens gives no chunks."""
        title_text, title_ids = self._title_line(title)
        ids, offsets = self._tokenize(body)
        return [
            TextChunk(title_text + _text_of(body, offsets, start, stop), (*title_ids, *ids[start:stop]))
            for start, stop in windows(len(ids), self._max - len(title_ids), self._overlap)
        ]

    def _title_line(self, title: str) -> tuple[str, list[int]]:
        if not title or not self._title_limit:
            return "", []
        line = f"{title}\n"
        ids, offsets = self._tokenize(line)
        if len(ids) <= self._title_limit:
            return line, ids
        kept = self._title_limit - 1  # and the last id, which ends the line
        return _text_of(line, offsets, 0, kept) + "\n" if kept else "\n", [*ids[:kept], ids[-1]]

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._tokenizer(
            text,
            add_special_tokens=False,
            # A document that spells a control token out must not become one: it is text, not chat structure.
            split_special_tokens=True,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return encoded["input_ids"], encoded["offset_mapping"]


def windows(total: int, size: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Half-open windows over `total` items: `size` each (the last may be shorter), `overlap` shared by neighbours."""
    start = 0
    while start < total:
        stop = min(start + size, total)
        yield start, stop
        if stop == total:
            return
        start = stop - overlap


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256, lower-case hex, over everything that decides which ids a text gets."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {key: value for key, value in description.items() if key not in _STATEFUL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _text_of(text: str, offsets: Sequence[tuple[int, int]], start: int, stop: int) -> str:
    """Text of tokens `start` to `stop`. Offsets may leave white space between tokens out: it goes with what follows."""
    begin = min(offsets[start][0], offsets[start - 1][1]) if start else 0
    end = len(text) if stop == len(offsets) else offsets[stop - 1][1]
    return text[begin:end]
