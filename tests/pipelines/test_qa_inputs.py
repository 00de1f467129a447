# SPDX-License-Identifier: Apache-2.0
"""Question-answering data sets and the published evaluation's inputs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvcache.prompt import plain_ids
from pipelines.qa.articles import Article, ArticleSearch, article_chunks, read_articles
from pipelines.qa.dataset import DatasetError, QARow, dataset_digest, read_dataset
from pipelines.qa.inputs import capped, fixed_chunks, recut
from pipelines.readers import InputError
from tests.pipelines.inputs import write_jsonl
from tests.tiny import tiny_tokenizer

RECORDS: list[dict[str, Any]] = [
    {
        "id": "q1",
        "question": " Who wrote the song? ",
        "answers": ["Ann", "Ann B."],
        "type": "bridge",
        "chunks": [
            {"title": "Song", "text": "Ann wrote it.", "is_supporting": True},
            {"title": "", "text": "A river.", "is_supporting": False},
        ],
    },
    {"id": 2, "question": "When?", "answers": ["one"], "chunks": [{"title": "T", "text": "x"}]},
    {"id": "q3", "question": "Where?", "answers": ["two"], "evidence_chunk_ids": ["c1"]},
]
ROWS = [
    QARow("q1", "Who wrote the song?", ("Ann", "Ann B."), ("Song\nAnn wrote it.", "A river.")),
    QARow("2", "When?", ("one",), ("T\nx",)),
    QARow("q3", "Where?", ("two",), None),
]


def test_rows_of_jsonl(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "qa.jsonl", RECORDS)
    assert read_dataset(tmp_path / "qa.jsonl") == ROWS
    assert read_dataset((tmp_path / "qa.jsonl").as_uri(), limit=2) == ROWS[:2]


def test_rows_of_parquet_are_the_same(tmp_path: Path) -> None:
    records = [{"chunks": None, **record, "id": str(record["id"])} for record in RECORDS]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "qa.parquet")
    rows = read_dataset(tmp_path / "qa.parquet")
    assert rows == ROWS
    assert dataset_digest(rows) == dataset_digest(ROWS) != dataset_digest(ROWS[:2])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x"', r"qa\.jsonl, line 4: Invalid JSON"),
        ('{"id": "x", "answers": ["a"]}', "line 4, field question: Field required"),
        ('{"id": "x", "question": "  ", "answers": ["a"]}', "line 4, field question"),
        ('{"id": "x", "question": "q", "answers": []}', "line 4, field answers"),
        ('{"id": "x", "question": "q", "answers": ["a", ""]}', r"line 4, field answers\.1"),
        ('{"id": "x", "question": "q", "answers": ["a"], "chunks": []}', "line 4, field chunks"),
        (
            '{"id": "x", "question": "q", "answers": ["a"], "chunks": [{"title": "t"}]}',
            r"line 4, field chunks\.0\.text",
        ),
        ('{"id": "q1", "question": "q", "answers": ["a"]}', r"line 4, field id: 'q1' was already used in .*line 1"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "qa.jsonl"
    write_jsonl(path, RECORDS)
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(DatasetError, match=message):
        read_dataset(path)


def test_a_bad_parquet_row_and_no_data_at_all(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"id": ["a", "b"], "question": ["q", "q"], "answers": [["x"], None]}), tmp_path / "a.parquet"
    )
    with pytest.raises(DatasetError, match=r"a\.parquet, row 2, field answers"):
        read_dataset(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="does not exist"):
        read_dataset(tmp_path / "nowhere.jsonl")
    (tmp_path / "notes.md").write_text("# Notes\n\ntext")
    with pytest.raises(DatasetError, match="JSONL or Parquet, not markdown"):
        read_dataset(tmp_path / "notes.md")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DatasetError, match="no records"):
        read_dataset(tmp_path / "empty.jsonl")


def test_caps() -> None:
    tokenizer = tiny_tokenizer()
    texts = tuple(f"chunk {i} of the text <|im_end|> " * (i + 1) for i in range(25))
    row = QARow("r", "q", ("a",), texts)
    whole = [tuple(plain_ids(tokenizer, text)) for text in texts]
    assert fixed_chunks(row, tokenizer, max_chunks=4, max_tokens=100_000) == whole[:4]
    got = fixed_chunks(row, tokenizer, max_tokens=997)
    assert len(got) == 20
    assert got == [ids[:49] for ids in whole[:20]]  # floor(997 / 20)
    assert tokenizer.eos_token_id not in {token for ids in got for token in ids}
    with pytest.raises(ValueError, match="r: the row has no chunks"):
        fixed_chunks(QARow("r", "q", ("a",), None), tokenizer)
    with pytest.raises(ValueError, match="3 tokens are not enough for 4 chunks"):
        capped([[1]] * 4, 3)


@pytest.mark.parametrize("total", [0, 3, 19, 20, 47, 4096])
def test_windows_are_equal_and_the_first_ones_take_the_remainder(total: int) -> None:
    ids = list(range(total))
    got = recut([ids[: total // 3], ids[total // 3 :]])
    assert [token for window in got for token in window] == ids
    lengths = [len(window) for window in got]
    assert lengths == [n for n in [total // 20 + 1] * (total % 20) + [total // 20] * (20 - total % 20) if n]


def test_article_chunks_carry_their_header_within_the_limit() -> None:
    tokenizer = tiny_tokenizer()
    articles = [
        Article(title="Old bridge", source="City", published_at="2023-10-01", category="news", body="the river " * 40),
        Article(text="only text"),
    ]
    chunks = article_chunks(articles, tokenizer, max_tokens=90)
    header = plain_ids(tokenizer, "Title: Old bridge\nSource: City\nDate: 2023-10-01\nCategory: news\n")
    body = plain_ids(tokenizer, ("the river " * 40).strip())
    of_first = [chunk.token_ids for chunk in chunks if chunk.article == 0]
    assert all(list(ids[: len(header)]) == header for ids in of_first)
    assert [len(ids) for ids in of_first[:-1]] == [90] * (len(of_first) - 1)
    assert [token for ids in of_first for token in ids[len(header) :]] == body
    assert chunks[-1].text == "only text" and chunks[-1].article == 1
    with pytest.raises(ValueError, match=r"article 0 .*header takes"):
        article_chunks(articles, tokenizer, max_tokens=len(header))


def test_search_is_bm25_with_at_most_two_chunks_of_an_article() -> None:
    random, tokenizer = Random(3), tiny_tokenizer()
    words = [f"w{i}" for i in range(30)] + ["x", "7", "Ünder"]
    articles = [Article(text=" ".join(random.choices(words, k=random.randint(5, 60)))) for _ in range(40)]
    articles += [articles[0], articles[3]]  # equal scores: the earlier article first
    chunks = article_chunks(articles, tokenizer, max_tokens=64)
    search = ArticleSearch(chunks)
    for question in ("w1 w2, W2?", "x7 7 x w29", "ünder-w5 w11 w11 w11", "w0 w1 w2 w3 w4 w5"):
        got = search.search(question)
        assert [chunks.index(chunk) for chunk in got] == _bm25([chunk.text for chunk in chunks], question, chunks)
    assert search.search("unknown words only") == []


def _bm25(texts: list[str], question: str, chunks: list[Any]) -> list[int]:
    """The formula of the specification, term by term."""

    def terms(text: str) -> list[str]:
        return "".join(c if c.isalnum() else " " for c in text.lower()).split()

    documents = [terms(text) for text in texts]
    average = sum(map(len, documents)) / len(documents)
    scores = [0.0] * len(documents)
    for term in terms(question):
        df = sum(term in document for document in documents)
        idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
        for index, document in enumerate(documents):
            tf = document.count(term)
            scores[index] += idf * tf * 2.5 / (tf + 1.5 * (0.25 + 0.75 * len(document) / average))
    kept: list[int] = []
    for index in sorted(range(len(documents)), key=lambda index: (-round(scores[index], 6), index)):
        if scores[index] > 0 and sum(chunks[index].article == chunks[k].article for k in kept) < 2:
            kept.append(index)
    return kept[:8]


def test_articles_of_both_kinds_of_file(tmp_path: Path) -> None:
    record = {"title": "T", "source": "S", "published_at": "D", "category": "C", "body": "B", "url": "U"}
    (tmp_path / "corpus.json").write_text(json.dumps([record]))
    write_jsonl(tmp_path / "chunks.jsonl", [{"id": "c0", "text": "B", "origin": "o"}])
    assert read_articles(tmp_path / "corpus.json")[0].header == "Title: T\nSource: S\nDate: D\nCategory: C\n"
    assert read_articles(tmp_path / "chunks.jsonl") == [Article(text="B")]
    write_jsonl(tmp_path / "bad.jsonl", [{"text": "B"}, {"title": "T"}])
    with pytest.raises(DatasetError, match=r"bad\.jsonl, line 2, field body"):
        read_articles(tmp_path / "bad.jsonl")
