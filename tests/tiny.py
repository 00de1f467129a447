# SPDX-License-Identifier: Apache-2.0
"""Tiny random target LLMs: every family the product supports, milliseconds to run, no network and no files to fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvcache.settings import Settings, load_settings
from kvcache.target import TargetLLM

Family = Literal["llama", "qwen2", "qwen3", "mistral"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "mistral")
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}
VOCABULARY = 512

_WORDS = (
    "the chunk of text is read once and its cache is kept for the question that comes later; who wrote the song and "
    "when was the film made in the city on the river near the old bridge, answer with a few words: yes no one two "
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model_dir(folder: Path, family: Family = "llama", *, layers: int = 3, seed: int = 0, **config: Any) -> str:
    """Save a random float32 model of that family, with a byte-level BPE tokenizer and a chat template.

    Args:
        folder: where to make the model's directory.
        family: architecture.
        layers: decoder layers.
        seed: of the weights: another seed is another target.
        config: more of the transformers config, such as `rope_parameters`.

    Returns:
        The directory, which `from_pretrained` takes.
    """
    directory = folder / f"tiny-{family}-{seed}"
    tokenizer = tiny_tokenizer()
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,  # attention far from uniform, so that a wrong position shows
    )
    if family == "mistral":
        sizes["sliding_window"] = None  # its default is a window, which targets must not have
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **config}), dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of a few hundred ids with ChatML's special tokens and template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_TEMPLATE,
    )


def tiny_settings(directory: str, **overrides: Any) -> Settings:
    """Settings for a model made by `tiny_model_dir`, with everything else in a folder beside it."""
    target = {"model": directory, **overrides.pop("target", {})}
    engine = {"max_model_len": 512, "kv_cache_bytes": 64 * 2**20, **overrides.pop("engine", {})}
    return load_settings(**{"root": f"{directory}-data", "target": target, "engine": engine, **overrides})


def tiny_target(folder: Path, family: Family = "llama", rope: str = "default", **config: Any) -> TargetLLM:
    """Make and load a tiny target."""
    return TargetLLM.load(settings=tiny_settings(tiny_model_dir(folder, family, rope_parameters=ROPES[rope], **config)))
