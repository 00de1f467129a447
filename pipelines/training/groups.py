# SPDX-License-Identifier: Apache-2.0
"""Token groups: the chunks that a prompt may hold together, and the arrangements of them that training sees.

A group file is JSONL. A line is `{"chunks": [[ids], ...]}`, chunks of token ids, or `{"passages": [id, ...]}`, names
of lines `{"id": ..., "text": ...}` in a passages file, whose text is tokenised as ingest tokenises it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.geometry import Geometry
from kvcache.prompt import plain_ids

Chunk = tuple[int, ...]


class GroupError(ValueError):
    """A line of training data that cannot be used; the text names file, line and reason."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")


@dataclass(frozen=True)
class TokenGroup:
    """Chunks that belong together, without the header chunk.

    Attributes:
        name: for messages.
        chunks: token ids per chunk.
    """

    name: str
    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(map(len, self.chunks))


def read_groups(
    path: Path, passages: Path | None, tokenizer: PreTrainedTokenizerBase, geometry: Geometry, max_tokens: int
) -> list[TokenGroup]:
    """Read a group file.

    Args:
        path: the group file.
        passages: the passages file, for lines that name passages.
        tokenizer: the target's.
        geometry: the target's.
        max_tokens: passages are cut to this many tokens; given chunks may not be longer than the model's positions.

    Raises:
        GroupError: a line that is not a group: its file, number and fault.
        OSError: a file that cannot be read.
    """
    texts = _read_passages(passages) if passages is not None else {}
    tokenised: dict[Any, Chunk] = {}
    groups = []
    for line, row in _rows(path):
        if isinstance(row, dict) and "chunks" in row:
            chunks = _given(row["chunks"], path, line, geometry)
        elif isinstance(row, dict) and isinstance(row.get("passages"), list):
            for name in row["passages"]:
                if not isinstance(name, int | str):
                    raise GroupError(path, line, f"a passage id is a whole number or a string, not {name!r}")
                if name not in texts:
                    where = f"is not in {passages}" if passages else "is named, and no passages file was given"
                    raise GroupError(path, line, f"passage {name!r} {where}")
                if name not in tokenised:
                    tokenised[name] = tuple(plain_ids(tokenizer, texts[name])[:max_tokens])
            chunks = [tokenised[name] for name in row["passages"]]
        else:
            raise GroupError(path, line, 'neither {"chunks": [[ids], ...]} nor {"passages": [ids]}')
        chunks = list(dict.fromkeys(chunk for chunk in chunks if chunk))
        if not chunks:
            raise GroupError(path, line, "the group has no tokens")
        groups.append(TokenGroup(str(row.get("id", line)), tuple(chunks)))
    if not groups:
        raise GroupError(path, 1, "the file holds no groups")
    return groups


def split(
    groups: Sequence[TokenGroup], held_out: int, limit: int, seed: int
) -> tuple[list[TokenGroup], list[TokenGroup]]:
    """Choose groups to train on and groups to validate on, that share no chunk.

    Args:
        groups: all of them.
        held_out: how many to validate on.
        limit: most groups to train on; 0 takes all.
        seed: of the choice.

    Returns:
        Training groups (those that share a chunk with a held-out one left out) and held-out groups.

    Raises:
        ValueError: nothing is left to train on.
    """
    order = list(groups)
    Random(seed).shuffle(order)
    validation, rest = order[:held_out], order[held_out:]
    unseen = {chunk for group in validation for chunk in group.chunks}
    training = [group for group in rest if unseen.isdisjoint(group.chunks)]
    if not training:
        raise ValueError(f"{len(groups)} groups, {held_out} of them held out: none is left to train on")
    return training[: limit or None], validation


def epoch_order(groups: int, seed: int, epoch: int) -> list[int]:
    """Order in which an epoch (0-based) visits the groups; the published recipe's."""
    order = list(range(groups))
    Random(seed * 1_000_003 + epoch * 10_007).shuffle(order)
    return order


def arrange(group: TokenGroup, header: Chunk, seed: int, variant: int, max_tokens: int) -> tuple[Chunk, ...]:
    """One arrangement of a group: some of its chunks, in some order, behind the header chunk if there is one.

    Args:
        group: its chunks.
        header: the header chunk, which a served prompt begins with; empty for none.
        seed, variant: decide the arrangement, together with the group's name: no state, so a resumed run sees what
            an uninterrupted one would have seen.
        max_tokens: most tokens, the header's included; chunks that would exceed it are left out.
    """
    random = Random(f"{seed}/{group.name}/{variant}")
    chosen = random.sample(group.chunks, random.randint(min(2, len(group.chunks)), len(group.chunks)))
    result, room = [header] if header else [], max_tokens - len(header)
    for chunk in chosen:
        if len(chunk) <= room:
            result.append(chunk)
            room -= len(chunk)
    return tuple(result)


def _read_passages(path: Path) -> dict[Any, str]:
    texts = {}
    for line, row in _rows(path):
        if not isinstance(row, dict) or "id" not in row or not isinstance(row.get("text"), str):
            raise GroupError(path, line, 'not {"id": ..., "text": ...}')
        name = row["id"]
        if not isinstance(name, int | str):
            raise GroupError(path, line, f"a passage id is a whole number or a string, not {name!r}")
        if texts.get(name, row["text"]) != row["text"]:
            raise GroupError(path, line, f"passage {name!r} was there before, with another text")
        texts[name] = row["text"]
    return texts


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                try:
                    yield number, json.loads(text)
                except ValueError as error:  # bytes that are not UTF-8 among them
                    raise GroupError(path, number, f"not JSON ({error})") from None


def _given(chunks: Any, path: Path, line: int, geometry: Geometry) -> list[Chunk]:
    if not isinstance(chunks, list) or not chunks:
        raise GroupError(path, line, "the group has no chunks")
    for index, ids in enumerate(chunks):
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise GroupError(path, line, f"chunk {index} is not a list of token ids")
        if not 0 < len(ids) <= geometry.max_positions:
            raise GroupError(path, line, f"chunk {index} has {len(ids)} tokens; want 1 to {geometry.max_positions}")
        foreign = [i for i in ids if not 0 <= i < geometry.vocab_size]
        if foreign:
            raise GroupError(
                path, line, f"chunk {index} has token id {foreign[0]}; the target knows 0 to {geometry.vocab_size - 1}"
            )
    return [tuple(ids) for ids in chunks]
