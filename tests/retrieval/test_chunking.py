# SPDX-License-Identifier: Apache-2.0
"""Chunks are cut in token ids: nothing is lost, repeated beyond the overlap, or tokenised again."""

from __future__ import annotations

import itertools
import random

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.settings import ChunkingSettings
from retrieval.chunking import Chunker, ChunkingError, tokenizer_digest

ALPHABET = [
    "the",
    " quick",
    " brown",
    " ",
    "\n",
    "  \n\n",
    "é",
    "ß",
    "日本語",
    "🤖",
    "👩‍👩‍👧",
    "𐍈",
    "\u0301",
    "'s",
    "\t",
    "x" * 30,
]


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randint(1, 120)))


@pytest.mark.parametrize("seed", range(150))
def test_chunks_without_their_overlap_are_the_document(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.randint(2, 40)
    overlap = rng.randint(0, longest - 1)
    title = rng.choice(["", "", "A title", "Ünï 🤖", "long title " * 9])
    body = random_text(rng)
    chunks = Chunker(tokenizer, ChunkingSettings(max_tokens=longest, overlap_tokens=overlap)).chunks(title, body)

    assert all(0 < len(chunk.token_ids) <= longest for chunk in chunks)
    prefix = 0
    if title:
        line = ids_of(tokenizer, f"{title}\n")
        prefix = min(len(line), (longest - overlap) // 2)
        expected = (line if prefix == len(line) else [*line[: prefix - 1], line[-1]]) if prefix else []
        assert all(list(chunk.token_ids[:prefix]) == expected for chunk in chunks)
    bodies = [list(chunk.token_ids[prefix:]) for chunk in chunks]
    for before, after in itertools.pairwise(bodies):
        assert before[len(before) - overlap :] == after[:overlap]
        assert len(before) == longest - prefix  # only the last chunk may be short
        assert len(after) > overlap  # and none is only repetition
    assert bodies[0] + [token for part in bodies[1:] for token in part[overlap:]] == ids_of(tokenizer, body)


@pytest.mark.parametrize("seed", range(50))
def test_text_and_ids_agree(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    rng = random.Random(1000 + seed)
    title, body = rng.choice(["", "Título"]), random_text(rng)
    for chunk in Chunker(tokenizer, ChunkingSettings(max_tokens=24, overlap_tokens=5)).chunks(title, body):
        line = f"{title}\n" if title else ""
        text, decoded = chunk.text.removeprefix(line), tokenizer.decode(chunk.token_ids).removeprefix(line)
        whole = decoded.strip("\ufffd")
        if whole == decoded:
            assert text == decoded
        # A cut inside a character leaves some of its bytes on each side; in the text it is whole on both.
        assert whole in text
        assert len(text) - len(whole) <= 2


def test_a_character_split_over_tokens_survives_the_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(ids_of(tokenizer, "🤖")) == 4
    chunks = Chunker(tokenizer, ChunkingSettings(max_tokens=3, overlap_tokens=0)).chunks("", "a🤖b")
    assert [chunk.text for chunk in chunks] == ["a🤖", "🤖b"]
    assert [*chunks[0].token_ids, *chunks[1].token_ids] == ids_of(tokenizer, "a🤖b")


def test_a_title_is_part_of_every_chunk(tokenizer: PreTrainedTokenizerBase) -> None:
    chunks = Chunker(tokenizer, ChunkingSettings(max_tokens=24, overlap_tokens=4)).chunks("Paris", "word " * 60)
    assert len(chunks) > 2
    assert all(chunk.text.startswith("Paris\n") for chunk in chunks)
    assert all(tokenizer.decode(chunk.token_ids) == chunk.text for chunk in chunks)


def test_text_that_spells_a_control_token_does_not_become_one(tokenizer: PreTrainedTokenizerBase) -> None:
    (chunk,) = Chunker(tokenizer, ChunkingSettings()).chunks("<|im_end|>", "x<|im_start|>system")
    assert not set(tokenizer.all_special_ids) & set(chunk.token_ids)
    assert tokenizer.decode(chunk.token_ids) == chunk.text == "<|im_end|>\nx<|im_start|>system"


def test_an_overlap_as_long_as_the_chunk_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ChunkingError, match=r"overlap_tokens \(8\).*max_tokens \(8\)"):
        Chunker(tokenizer, ChunkingSettings(max_tokens=8, overlap_tokens=8))


def test_the_digest_is_of_the_tokenizer_and_not_of_its_last_call(tokenizer: PreTrainedTokenizerBase) -> None:
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(tokenizer) == before
    tokenizer(["a"], padding=False, truncation=False)


def test_another_vocabulary_has_another_digest(tokenizer: PreTrainedTokenizerBase) -> None:
    other = tokenizer.__class__(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    )
    assert tokenizer_digest(other) == tokenizer_digest(tokenizer)
    other.add_tokens(["zebra"])
    assert tokenizer_digest(other) != tokenizer_digest(tokenizer)
