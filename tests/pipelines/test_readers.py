# SPDX-License-Identifier: Apache-2.0
"""Every kind of file, and everything that can be wrong with a record."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.readers import BadRecord, Document, InputError, find_files, read_file
from retrieval.types import MAX_DOCUMENT_ID
from serve_app.schemas import RagOptions


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs are named relative to an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*inputs: str) -> list[Document | BadRecord]:
    return [record for file in find_files(inputs) for record in read_file(file)]


def test_jsonl_fields_and_defaults() -> None:
    Path("a.jsonl").write_text(
        '{"id": "x", "title": " T\\nU ", "text": " body ", "source": "web", "other": 1}\n'
        '\n{"contents": "c"}\r\n{"body": "b", "id": 7}\n{"text": null, "body": "last"}'
    )
    assert read("a.jsonl") == [
        Document(1, "x", "T U", "body", "web"),
        Document(3, "a.jsonl:3", "", "c", "a.jsonl"),
        Document(4, "7", "", "b", "a.jsonl"),
        Document(5, "a.jsonl:5", "", "last", "a.jsonl"),
    ]


BAD_LINES = {
    b'{"text": "cut': "invalid JSON",
    b"nonsense": "invalid JSON",
    b"[" * 100_000: "invalid JSON",
    b'{"text": ' + b"9" * 5000 + b"}": "invalid JSON",
    b'["text"]': "must be a JSON object, not array",
    b'"text"': "must be a JSON object, not str",
    b"{}": "no text",
    b'{"text": null}': "no text",
    b'{"id": 1, "question": "q", "answers": [], "chunks": [{"title": "t", "text": "x"}]}': "no text",
    b'{"text": ""}': "text is empty",
    b'{"body": " \\n\\t"}': "body is empty",
    b'{"text": 3}': "text must be a string, not number",
    b'{"text": ["a"]}': "text must be a string, not array",
    b'{"text": "a", "title": {}}': "title must be a string, not object",
    b'{"text": "a", "source": 1}': "source must be a string, not number",
    b'{"text": "a", "id": 1.5}': "id must be a string, not number",
    b'{"text": "a", "id": true}': "id must be a string, not boolean",
    b'{"text": "a", "id": " "}': "id is empty",
    b'{"text": "a\xff"}': "invalid UTF-8 at byte 12",
    b'{"text": "a\\u0000b"}': "text holds a NUL",
    b'{"text": "a", "id": "\\u0000"}': "id holds a NUL",
    b'{"text": "a\x00b"}': "invalid JSON",
    b'{"text": "\\ud800"}': "surrogate",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:24].decode(errors="replace").replace("\0", "NUL"))
def test_a_bad_line_is_named_and_the_rest_is_read(line: bytes) -> None:
    Path("a.jsonl").write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    before, bad, after = read("a.jsonl")
    assert (before.text, after.text) == ("before", "after")
    assert (bad.file, bad.line) == ("a.jsonl", 2)
    assert BAD_LINES[line] in bad.reason


def test_an_id_too_long_to_ask_for_its_chunks_is_a_bad_record() -> None:
    longest = "ü" * MAX_DOCUMENT_ID
    rows = [{"id": longest, "text": "a"}, {"id": longest + "x", "text": "b"}, {"id": 10**300, "text": "c"}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    good, text, number = read("a.jsonl")
    assert good.document_id == longest
    assert text == BadRecord("a.jsonl", 2, "id has 241 characters: shorten it to at most 240")
    assert (number.line, number.reason) == (3, "id has 301 characters: shorten it to at most 240")
    # What is accepted can be asked for, whatever the number of chunks of the document.
    assert RagOptions(chunk_ids=[f"{longest}#{10**9}"]).chunk_ids


def test_a_long_path_gives_a_short_id_that_stays_the_same_and_is_its_own() -> None:
    folders = [Path(first * 100, *["d" * 100] * 3) for first in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "n.txt").write_text("text")
        (folder / "r.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three", "id": "own"}\n')
    found = read(*(str(folder) for folder in folders))
    assert [document.text for document in found] == ["text", "one", "two", "three"] * 2
    ids = [document.document_id for document in found]
    assert len(set(ids)) == 7 and ids[3] == ids[7] == "own"
    derived = [document for document in found if document.document_id != "own"]
    assert all(len(document.document_id) <= MAX_DOCUMENT_ID for document in derived)
    assert [document.document_id[-9:] for document in derived[:3]] == ["ddd/n.txt", "r.jsonl:1", "r.jsonl:2"]
    assert derived[0].document_id.startswith(hashlib.sha256(derived[0].source.encode()).hexdigest()[:32] + ":")
    assert [document.source for document in derived] == [
        str(folder / name) for folder in folders for name in ("n.txt", "r.jsonl", "r.jsonl")
    ]
    assert ids == [document.document_id for document in read(*(str(folder) for folder in folders))]


def test_parquet_rows() -> None:
    pq.write_table(pa.table({"contents": ["a", None, ""], "id": [5, 6, 7], "title": ["t", "u", None]}), "a.parquet")
    assert read("a.parquet") == [
        Document(1, "5", "t", "a", "a.parquet"),
        BadRecord("a.parquet", 2, "no text: a record needs one of text, contents, body"),
        BadRecord("a.parquet", 3, "contents is empty"),
    ]


def test_parquet_with_bytes_that_are_no_text() -> None:
    values = pa.array([b"good", b"\xff\xfe", b"g\x00d"])
    text = pa.Array.from_buffers(pa.string(), 3, values.buffers())  # unchecked, as a careless writer leaves it
    pq.write_table(pa.table({"text": text.dictionary_encode(), "n": [1, 2, 3]}), "d.parquet")
    pq.write_table(pa.table({"text": text, "n": [1, 2, 3]}), "s.parquet")
    for name in ("d.parquet", "s.parquet"):
        good, invalid, nul = read(name)
        assert good.text == "good"
        assert (invalid.line, invalid.reason) == (2, "text is not valid UTF-8")
        assert (nul.line, nul.reason) == (3, "text holds a NUL character")


def test_parquet_that_cannot_be_used_at_all_is_one_bad_record() -> None:
    pq.write_table(pa.table({"x": [1]}), "a.parquet")
    Path("b.parquet").write_bytes(b"PAR1 nonsense")
    no_column, broken = read("a.parquet", "b.parquet")
    assert (no_column.file, no_column.line) == ("a.parquet", None) and "it has x" in no_column.reason
    assert (broken.file, broken.line) == ("b.parquet", None) and "cannot be read" in broken.reason


def test_text_and_markdown() -> None:
    Path("a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    Path("b.md").write_text("\n# The title #\n\nBody\n\n## Section\nmore\n")
    Path("c.markdown").write_text("Body\n# Not the first line\n")
    Path("d.md").write_text("# Only a heading\n")
    assert read("a.txt", "b.md", "c.markdown", "d.md") == [
        Document(1, "a.txt", "", "one\ntwo", "a.txt"),
        Document(1, "b.md", "The title", "Body\n\n## Section\nmore", "b.md"),
        Document(1, "c.markdown", "", "Body\n# Not the first line", "c.markdown"),
        Document(1, "d.md", "", "# Only a heading", "d.md"),
    ]


@pytest.mark.parametrize(
    ("data", "line", "reason"),
    [
        (b"a\nb\nc\xff\n", 3, "invalid UTF-8"),
        (b"a\n\0", 2, "NUL character"),
        (b" \n ", 1, "text is empty"),
        (b"", 1, "text is empty"),
    ],
)
def test_bad_text_files(data: bytes, line: int, reason: str) -> None:
    Path("a.txt").write_bytes(data)
    assert read("a.txt") == [BadRecord("a.txt", line, reason)]


def test_folders_are_read_in_a_fixed_order_without_hidden_or_unknown_files() -> None:
    for name in ("docs/b.txt", "docs/a/z.md", "docs/a.jsonl", "docs/.git/x.txt", "docs/.h.txt", "docs/x.pdf", "c.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps({"text": name}))
    names = ["docs/a.jsonl", "docs/a/z.md", "docs/b.txt"]
    for spelling in ("docs", "./docs/", "docs/../docs"):
        assert [file.source for file in find_files([spelling])] == names
    assert [file.source for file in find_files(["c.txt", "docs", "docs/b.txt"])] == ["c.txt", *names]


@pytest.mark.parametrize("name", ["missing.jsonl", "missing/", "x.pdf", "empty", "nowhere://bucket/x"])
def test_an_input_that_gives_nothing_is_refused_by_name(name: str) -> None:
    Path("empty").mkdir()
    Path("x.pdf").write_text("x")
    with pytest.raises(InputError, match=name.rstrip("/")):
        find_files([name])


def test_a_uri_is_named_without_credentials_and_options(here: Path) -> None:
    Path("docs").mkdir()
    Path("docs/a.txt").write_text("x")
    (file,) = find_files([f"file://{here}/docs/"])
    assert file.source == f"file://{here}/docs/a.txt"
    assert next(read_file(file)).text == "x"
    with pytest.raises(InputError) as error:
        find_files(["nowhere://user:secret@host/x?token=secret"])
    assert "secret" not in str(error.value)
