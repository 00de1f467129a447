# SPDX-License-Identifier: Apache-2.0
"""Training data: what a group file may hold, how groups are split and arranged, and what bad lines are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcache.geometry import Geometry
from kvcache.prompt import plain_ids
from pipelines.training.groups import GroupError, TokenGroup, arrange, read_groups, split
from tests.tiny import tiny_tokenizer

GEOMETRY = Geometry(3, 2, 32, 4, 128, vocab_size=512, max_positions=64)
HEADER = (1, 2, 3)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def read(path: Path, passages: Path | None = None, max_tokens: int = 16) -> list[TokenGroup]:
    return read_groups(path, passages, tiny_tokenizer(), GEOMETRY, max_tokens)


def test_token_ids_and_passages(tmp_path: Path) -> None:
    text = "the song was made in the city on the river <|im_end|>"
    passages = write(tmp_path / "p.jsonl", {"id": 7, "text": text}, {"id": "b", "text": "who"})
    groups = write(tmp_path / "g.jsonl", {"id": "x", "passages": [7, "b"]}, "", {"chunks": [[5, 6], [7]]})
    first, second = read(groups, passages)
    ids = plain_ids(tiny_tokenizer(), text)
    assert len(ids) > 16  # so that the cut shows; and the control token is spelled out
    assert first == TokenGroup("x", (tuple(ids[:16]), tuple(plain_ids(tiny_tokenizer(), "who"))))
    assert second.chunks == ((5, 6), (7,)) and second.tokens == 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{oops", "not JSON"),
        ([1, 2], "neither"),
        ({"text": "no"}, "neither"),
        ({"chunks": []}, "the group has no chunks"),
        ({"chunks": [[1], []]}, "chunk 1 has 0 tokens; want 1 to 64"),
        ({"chunks": [[1] * 65]}, "chunk 0 has 65 tokens; want 1 to 64"),
        ({"chunks": [[1], [2, 512]]}, "chunk 1 has token id 512; the target knows 0 to 511"),
        ({"chunks": [[-1]]}, "token id -1"),
        ({"chunks": [[True]]}, "chunk 0 is not a list of token ids"),
        ({"chunks": ["text"]}, "chunk 0 is not a list of token ids"),
        ({"passages": [1, 99]}, r"passage 99 is not in .*p\.jsonl"),
        ({"passages": [[1]]}, "a passage id is a whole number or a string"),
        ({"passages": []}, "the group has no tokens"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, row: Any, reason: str) -> None:
    passages = write(tmp_path / "p.jsonl", {"id": 1, "text": "one"})
    groups = write(tmp_path / "g.jsonl", {"chunks": [[1, 2]]}, row)
    with pytest.raises(GroupError, match=rf"g\.jsonl, line 2: .*{reason}"):
        read(groups, passages)


def test_bad_passages_are_named(tmp_path: Path) -> None:
    passages = write(tmp_path / "p.jsonl", {"id": 1, "text": "one"}, {"id": 2})
    with pytest.raises(GroupError, match=r"p\.jsonl, line 2"):
        read(write(tmp_path / "g.jsonl", {"passages": [1]}), passages)
    with pytest.raises(GroupError, match="no passages file was given"):
        read(write(tmp_path / "g.jsonl", {"passages": [1]}))
    listed = write(tmp_path / "p.jsonl", {"id": 1, "text": "one"}, {"id": [1], "text": "two"})
    with pytest.raises(GroupError, match=r"p\.jsonl, line 2: a passage id is a whole number or a string"):
        read(write(tmp_path / "g.jsonl", {"passages": [1]}), listed)
    twice = write(tmp_path / "p.jsonl", {"id": 1, "text": "one"}, {"id": 1, "text": "one"}, {"id": 1, "text": "two"})
    with pytest.raises(GroupError, match=r"p\.jsonl, line 3: passage 1 was there before"):
        read(write(tmp_path / "g.jsonl", {"passages": [1]}), twice)
    twice.write_bytes(b'{"id": 1, "text": "caf\xe9"}\n')
    with pytest.raises(GroupError, match=r"p\.jsonl, line 1: not JSON"):
        read(write(tmp_path / "g.jsonl", {"passages": [1]}), twice)
    with pytest.raises(GroupError, match="holds no groups"):
        read(write(tmp_path / "empty.jsonl"))


def test_held_out_groups_share_no_chunk_with_training() -> None:
    groups = [TokenGroup(str(g), ((g, 1), (g // 2, 9), (g, 2))) for g in range(40)]  # neighbours share a chunk
    training, held_out = split(groups, 5, 0, seed=1)
    assert len(held_out) == 5 and 30 <= len(training) < 35
    unseen = {chunk for group in held_out for chunk in group.chunks}
    assert not unseen & {chunk for group in training for chunk in group.chunks}
    assert split(groups, 5, 10, seed=1) == (training[:10], held_out)
    assert split(groups, 5, 0, seed=2)[1] != held_out
    with pytest.raises(ValueError, match="none is left to train on"):
        split(groups[:3], 3, 0, seed=1)


def test_arrangements_put_the_header_first_and_vary_order_number_and_choice() -> None:
    group = TokenGroup("g", tuple((10 + c,) * 5 for c in range(5)))
    seen = [arrange(group, HEADER, 7, variant, 1000) for variant in range(60)]
    assert all(chunks[0] == HEADER and len(set(chunks)) == len(chunks) for chunks in seen)
    assert {len(chunks) - 1 for chunks in seen} == {2, 3, 4, 5}
    assert {chunk for chunks in seen for chunk in chunks[1:]} == set(group.chunks)
    assert len({chunks[1:] for chunks in seen}) > 40
    assert seen == [arrange(group, HEADER, 7, variant, 1000) for variant in range(60)]
    assert seen != [arrange(group, HEADER, 8, variant, 1000) for variant in range(60)]


def test_without_a_header_the_same_chunks_come_in_the_same_order() -> None:
    group = TokenGroup("g", tuple((10 + c,) * 5 for c in range(5)))
    for variant in range(20):
        header, *chunks = arrange(group, HEADER, 7, variant, 1000)
        assert header == HEADER and arrange(group, (), 7, variant, 1000) == tuple(chunks)


def test_an_arrangement_keeps_within_its_tokens() -> None:
    group = TokenGroup("g", tuple((10 + c,) * (5 + c) for c in range(5)))
    for variant in range(60):
        chunks = arrange(group, HEADER, 7, variant, 20)
        assert sum(map(len, chunks)) <= 20 and len(chunks) > 1


def test_a_group_of_one_chunk_is_a_pair_of_header_and_chunk() -> None:
    assert arrange(TokenGroup("g", ((5,),)), HEADER, 7, 0, 100) == (HEADER, (5,))
