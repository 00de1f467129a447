# SPDX-License-Identifier: Apache-2.0
"""From rows to prompts: chunks of the row's own, or found in a corpus by the service's retriever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import ray
import ray.data

from kvcache.prompt import PromptTemplate
from kvcache.settings import Settings
from kvcache.target import load_tokenizer
from pipelines.embedding import EmbedderFactory
from pipelines.qa.dataset import DatasetError, QARow
from pipelines.qa.inputs import fixed_chunks
from pipelines.ray_data import Progress, quiet_ray_data
from retrieval.corpus import read_pointer
from retrieval.retriever import Retriever

_QUESTIONS = 32
"""Questions embedded and searched in one go, as in the service."""

Chunks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class QAPrompt:
    """A row as token ids.

    Attributes:
        row: the row.
        chunks: header chunk first.
        question_ids: ids that follow them.
    """

    row: QARow
    chunks: Chunks
    question_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(map(len, self.chunks)) + len(self.question_ids)


def own_prompts(rows: Sequence[QARow], settings: Settings) -> list[QAPrompt]:
    """Prompts over the rows' own chunks, capped as in `pipelines.qa.inputs`.

    Raises:
        DatasetError: a row without chunks.
    """
    for row in rows:
        if row.chunks is None:
            raise DatasetError(f"row {row.id!r} has no chunks of its own: name a corpus to search")
    tokenizer = load_tokenizer(settings)
    return _prompts(rows, [tuple(filter(None, fixed_chunks(row, tokenizer))) for row in rows], settings)


def retrieved_prompts(
    rows: Sequence[QARow],
    corpus: str,
    top_k: int,
    settings: Settings,
    embedder: EmbedderFactory,
    progress: Progress | None = None,
) -> tuple[list[QAPrompt], str]:
    """Prompts over what a corpus holds on each question, searched in a pool of actors.

    Args:
        rows: the questions.
        corpus: its name.
        top_k: chunks per question.
        settings: as `for_workers` gives them.
        embedder: makes the embedding model.
        progress: told (stage, done, total) for the stage `retrieve`.

    Returns:
        The prompts, and the corpus's generation.

    Raises:
        UnknownCorpusError: there is no such corpus.
        DatasetError: it cannot be searched, or a new generation came while it was.
    """
    read_pointer(settings.corpora_uri, corpus)
    table = pa.table({"number": range(len(rows)), "question": [row.question for row in rows]})
    blocks = [table.slice(start, _QUESTIONS) for start in range(0, len(rows), _QUESTIONS)]
    chunks: dict[int, Chunks] = {}
    generations: set[str] = set()
    with quiet_ray_data():
        found = ray.data.from_blocks(blocks).map_batches(
            _Retrieve,
            batch_size=_QUESTIONS,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=min(settings.pipeline.actors, len(blocks))),
            num_gpus=1 if settings.embedding.device != "cpu" and ray.cluster_resources().get("GPU") else None,
            fn_constructor_args=(settings, embedder, corpus, top_k),
        )
        try:
            for part in found.iter_batches(batch_size=None, batch_format="pyarrow"):
                for each in part.to_pylist():
                    chunks[each["number"]] = tuple(map(tuple, each["chunks"]))
                    generations.add(each["generation"])
                if progress:
                    progress("retrieve", len(chunks), len(rows))
        except ray.exceptions.RayError as error:
            # The last line of Ray's text names the error; the traceback before it stays in the cause.
            raise DatasetError(f"corpus {corpus!r}: {str(error).strip().splitlines()[-1]}") from error
    if len(generations) > 1:
        raise DatasetError(f"corpus {corpus!r} was replaced while it was searched: start again")
    return _prompts(rows, [chunks[number] for number in range(len(rows))], settings), generations.pop()


class _Retrieve:
    def __init__(self, settings: Settings, embedder: EmbedderFactory, corpus: str, top_k: int) -> None:
        self._retriever = Retriever(settings, embedder(settings))
        self._corpus, self._top_k = corpus, top_k

    def __call__(self, batch: pa.Table) -> pa.Table:
        found = self._retriever.query(self._corpus, batch["question"].to_pylist(), self._top_k)
        chunks = [[chunk.token_ids for chunk in hits] for hits in found.hits]
        return pa.table(
            {
                "number": batch["number"],
                "chunks": pa.array(chunks, pa.list_(pa.list_(pa.int32()))),
                "generation": [found.generation] * len(chunks),
            }
        )


def _prompts(rows: Sequence[QARow], chunks: Sequence[Chunks], settings: Settings) -> list[QAPrompt]:
    template = PromptTemplate(load_tokenizer(settings), settings.prompt)
    header = template.header_ids()

    def each() -> Iterator[QAPrompt]:
        for row, own in zip(rows, chunks, strict=True):
            question = template.question_ids([{"role": "user", "content": row.question}])
            yield QAPrompt(row, (header, *own), question)

    return list(each())
