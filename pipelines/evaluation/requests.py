# SPDX-License-Identifier: Apache-2.0
"""What is evaluated: each question of each data set, as the token ids of its chunks, its question and its answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvcache.prompt import PromptTemplate
from kvcache.settings import Settings
from kvcache.target import TargetLLM
from pipelines.evaluation.cuts import Cut, cut_name
from pipelines.qa.articles import ArticleSearch, article_chunks, read_articles
from pipelines.qa.dataset import QARow, dataset_digest, read_dataset
from pipelines.qa.inputs import capped, fixed_chunks, recut
from pipelines.qa.scoring import gold_ids

ANSWER_TOKENS = 32
"""Longest greedy answer, as in the published evaluation."""


class EvaluationError(ValueError):
    """An evaluation that cannot be run; the text says why and what to change."""


@dataclass(frozen=True)
class EvaluationRequest:
    """One question.

    Attributes:
        data: name of its data set.
        id: of the row.
        chunks: token ids per chunk; the first is the header chunk, or begins with the header.
        question_ids: ids that follow the chunks.
        answers: accepted answers, as text.
        answer_ids: their ids, as they follow the prompt.
    """

    data: str
    id: str
    chunks: tuple[tuple[int, ...], ...]
    question_ids: tuple[int, ...]
    answers: tuple[str, ...]
    answer_ids: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per chunk."""
        return tuple(map(len, self.chunks))

    @property
    def prefix_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(self.lengths)

    @property
    def digest(self) -> str:
        """SHA-256 over everything but the names."""
        content = {key: value for key, value in asdict(self).items() if key not in ("data", "id")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class DataSet:
    """A data set's requests.

    Attributes:
        name: the file's name without its ending, and how its text is cut anew, if it is.
        source: path of the file.
        digest: of the rows that are used.
        requests: in the file's order.
    """

    name: str
    source: str
    digest: str
    requests: tuple[EvaluationRequest, ...]


def read_requests(
    paths: Sequence[str],
    target: TargetLLM,
    settings: Settings,
    limit: int,
    max_chunks: int,
    max_tokens: int,
    articles: str | None = None,
    cuts: Sequence[Cut] = (),
    glue_header: bool = False,
) -> list[DataSet]:
    """Read data sets and build their requests.

    Args:
        paths: one file or folder per data set.
        target: the target LLM.
        settings: `settings.prompt` counts here.
        limit: most requests per data set; 0 takes all.
        max_chunks, max_tokens: caps on a request's own chunks, see `pipelines.qa.inputs.fixed_chunks`.
        articles: corpus for rows without chunks of their own: their best chunks by BM25 (`pipelines.qa.articles`),
            capped and re-cut into `max_chunks` windows, as MultiHop-RAG's published inputs are.
        cuts: a data set for each of these, the capped chunks cut anew; none leaves them as they are.
        glue_header: begin the first chunk with the header, as published inputs do, instead of a header chunk.

    Raises:
        DatasetError: a data set, or articles, that cannot be used.
        EvaluationError: two data sets of one name, rows without chunks, or a prompt that the target cannot take.
    """
    template = PromptTemplate(target.tokenizer, settings.prompt)
    header = template.header_ids()
    search = articles and ArticleSearch(article_chunks(read_articles(articles), target.tokenizer))
    variants, names = cuts or (None,), set[str]()
    result: list[DataSet] = []
    for path in paths:
        name = Path(path).stem
        if name in names:
            raise EvaluationError(f"{path}: there is another data set of the name {name!r}; rename one")
        names.add(name)
        rows = read_dataset(path, limit)
        made: list[list[EvaluationRequest]] = [[] for _ in variants]
        for row in rows:
            if row.chunks is not None:
                found = fixed_chunks(row, target.tokenizer, max_chunks, max_tokens)
            elif search:
                best = [chunk.token_ids for chunk in search.search(row.question)]
                if not best:
                    raise EvaluationError(f"{path}: row {row.id!r}: no article shares a word with its question")
                found = recut(capped(best, max_tokens), max_chunks)
            else:
                raise EvaluationError(
                    f"{path}: row {row.id!r} has no chunks of its own; --articles names a corpus to search for them"
                )
            found = [ids for ids in found if ids]
            question = template.question_ids([{"role": "user", "content": row.question}])
            for cut, requests in zip(variants, made, strict=True):
                own = tuple(found if cut is None else cut.of(found))
                chunks = ((*header, *own[0]), *own[1:]) if glue_header and own else (header, *own)
                requests.append(_request(cut_name(name, cut), row, chunks, question, target, settings))
                _check_length(path, requests[-1], target)
        digest = dataset_digest(rows)
        result += [
            DataSet(cut_name(name, cut), str(path), digest, tuple(requests))
            for cut, requests in zip(variants, made, strict=True)
        ]
    return result


def _request(
    name: str,
    row: QARow,
    chunks: tuple[tuple[int, ...], ...],
    question: tuple[int, ...],
    target: TargetLLM,
    settings: Settings,
) -> EvaluationRequest:
    answers = tuple(tuple(gold_ids(target.tokenizer, answer, settings.prompt)) for answer in row.answers)
    return EvaluationRequest(name, row.id, chunks, question, row.answers, answers)


def _check_length(path: str, request: EvaluationRequest, target: TargetLLM) -> None:
    longest = request.prefix_tokens + len(request.question_ids) + max(ANSWER_TOKENS, *map(len, request.answer_ids))
    if longest > target.geometry.max_positions:
        raise EvaluationError(
            f"{path}: row {request.id!r} needs {longest} positions, the target has {target.geometry.max_positions}; "
            "lower --max-tokens"
        )
