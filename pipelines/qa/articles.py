# SPDX-License-Identifier: Apache-2.0
"""Inputs of MultiHop-RAG's published evaluation: news articles in chunks, found by BM25 (methods, section 3.8).

Articles of at most 512-token chunks, each chunk with its article's metadata before it; the 8 best chunks of a question,
at most 2 of one article. `pipelines.qa.inputs` then caps and re-cuts them. The labels of the metadata lines are not
published: those here are ours.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from pydantic import AliasChoices, BaseModel, Field, StringConstraints, ValidationError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.prompt import plain_ids
from pipelines.qa.dataset import DatasetError, explained
from pipelines.readers import resolve
from retrieval.bm25 import LexicalIndex

CHUNK_TOKENS = 512
TOP_CHUNKS = 8
MOST_PER_ARTICLE = 2
_TERM = re.compile(r"[^\W_]+")


class Article(BaseModel):
    """An article of the corpus; `text` is `body` in MultiHop-RAG's own file."""

    title: str = ""
    source: str = ""
    published_at: str = ""
    category: str = ""
    text: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)] = Field(
        validation_alias=AliasChoices("body", "text")
    )

    @property
    def header(self) -> str:
        """Title, source, date, category, a line each; nothing for a text without any of them."""
        if not (self.title or self.source or self.published_at or self.category):
            return ""
        return f"Title: {self.title}\nSource: {self.source}\nDate: {self.published_at}\nCategory: {self.category}\n"


@dataclass(frozen=True)
class ArticleChunk:
    """A piece of an article.

    Attributes:
        article: number of the article in its corpus, from 0.
        text: what is searched: header and piece.
        token_ids: ids of header and piece.
    """

    article: int
    text: str
    token_ids: tuple[int, ...]


def read_articles(path: str | Path) -> list[Article]:
    """Read articles: a JSON array (MultiHop-RAG's own file) or JSONL, local path or URI.

    Raises:
        DatasetError: names file, line or number, and field.
    """
    articles = []
    for place, record in _records(str(path)):
        try:
            articles.append(Article.model_validate(record))
        except ValidationError as error:
            raise explained(place, error) from None
    if not articles:
        raise DatasetError(f"{path}: no records")
    return articles


def article_chunks(
    articles: Sequence[Article], tokenizer: PreTrainedTokenizerBase, max_tokens: int = CHUNK_TOKENS
) -> list[ArticleChunk]:
    """Cut articles, in order; the header's ids come first in every chunk and count in `max_tokens`.

    Raises:
        ValueError: a header that leaves no room.
    """
    result = []
    for number, article in enumerate(articles):
        header, body = plain_ids(tokenizer, article.header), plain_ids(tokenizer, article.text)
        room = max_tokens - len(header)
        if room < 1:
            raise ValueError(f"article {number} ({article.title!r}): its header takes {len(header)} tokens")
        for start in range(0, len(body), room):
            piece = body[start : start + room]
            result.append(ArticleChunk(number, article.header + tokenizer.decode(piece), (*header, *piece)))
    return result


class ArticleSearch:
    """BM25 over article chunks: k1 1.5, b 0.75, idf ln(1 + (n - df + 0.5) / (df + 0.5)), terms of lower-cased letters
    and digits, a term of the question counting as often as it comes.

    Args:
        chunks: in the order of articles and pieces, which decides between equal scores.
    """

    def __init__(self, chunks: Sequence[ArticleChunk]) -> None:
        self._chunks = chunks
        self._index = LexicalIndex([chunk.text for chunk in chunks], words=terms)

    def search(self, question: str, top: int = TOP_CHUNKS, per_article: int = MOST_PER_ARTICLE) -> list[ArticleChunk]:
        """The best chunks that share a term with the question, best first."""
        seen, found = Counter[int](), []
        for row in self._index.search([question], len(self._chunks))[0]:
            chunk = self._chunks[row]
            if seen[chunk.article] < per_article:
                seen[chunk.article] += 1
                found.append(chunk)
            if len(found) == top:
                break
        return found


def terms(texts: Sequence[str]) -> list[list[str]]:
    """Lower-cased runs of letters and digits."""
    return [_TERM.findall(text.lower()) for text in texts]


def _records(path: str) -> Iterator[tuple[str, Any]]:
    filesystem, inside = resolve(path)
    try:
        with filesystem.open_input_stream(inside) as stream:
            data = stream.read()
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    if inside.endswith(".json"):
        records = _parsed(path, data)
        if not isinstance(records, list):
            raise DatasetError(f"{path}: want a JSON array of articles")
        yield from ((f"{path}, article {number}", record) for number, record in enumerate(records, start=1))
        return
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", _parsed(f"{path}, line {number}", line)


def _parsed(place: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise DatasetError(f"{place}: invalid JSON: {error}") from None
