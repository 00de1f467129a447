# SPDX-License-Identifier: Apache-2.0
"""The target LLM: the frozen model that answers, and the stale KV it gives for a chunk."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.chunk import FORMAT_VERSION, ChunkKV
from kvcache.geometry import Geometry, Rotary
from kvcache.models import model_path
from kvcache.settings import Settings, TargetSettings, load_settings

_MODEL_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
_VOLATILE_CONFIG_KEYS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}


class TargetLLM:
    """A loaded target LLM.

    Attributes:
        model: the transformers model, frozen, in `dtype` on `device`.
        tokenizer: its tokenizer.
        geometry: shapes of its KV cache.
        rotary: its rotary embedding.
        fingerprint: lower-case hex digest of everything that shapes its KV.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fingerprint: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.geometry = Geometry.of(model.config)
        self.rotary = Rotary.of(model)

    @classmethod
    def load(cls, path_or_id: str | None = None, settings: Settings | None = None) -> TargetLLM:
        """Load a target.

        Args:
            path_or_id: directory, hub id or fetched name; None takes `settings.target.model`.
            settings: None reads them from the environment.

        Raises:
            ModelNotFoundError: a name that has not been fetched.
            UnsupportedTargetError: an architecture whose KV this code cannot move.
        """
        settings = settings or load_settings()
        if path_or_id is not None:
            target = settings.target.model_copy(update={"model": path_or_id})
            settings = settings.model_copy(update={"target": target})
        directory = target_directory(settings)
        dtype, device = target_dtype(settings), target_device(settings.target)
        Geometry.of(AutoConfig.from_pretrained(directory))  # refuse before the weights are read
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
        return cls(model.to(device), AutoTokenizer.from_pretrained(directory), target_fingerprint(settings))

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype, which is also the dtype of the KV it gives."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where its passes run."""
        return self.model.device

    @torch.inference_mode()
    def stale_kv(self, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
        """Compute the KV of each chunk alone, at positions 0, 1, ..., as one right-padded batch.

        Under a causal mask a row never sees the padding behind it, so no mask is needed.

        Args:
            chunks: token ids; none empty, none longer than the model's positions.

        Returns:
            One `ChunkKV` per chunk, canonical keys, in `dtype`, in host memory.

        Raises:
            ValueError: an empty or over-long chunk, or an id outside the vocabulary.
        """
        self.check(chunks)
        longest = max(map(len, chunks))
        input_ids_BT = torch.zeros(len(chunks), longest, dtype=torch.long)
        for row, ids in zip(input_ids_BT, chunks, strict=True):
            row[: len(ids)] = torch.as_tensor(ids)
        cache = self.model.get_decoder()(input_ids=input_ids_BT.to(self.device), use_cache=True).past_key_values
        positions_T = torch.arange(longest)
        result = [
            ChunkKV(tuple(ids), *(torch.empty(self.geometry.kv_shape(len(ids)), dtype=self.dtype) for _ in "kv"))
            for ids in chunks
        ]
        for index, layer in enumerate(cache.layers):
            k_BTHD = self.rotary.unrotate(layer.keys.transpose(1, 2), positions_T)
            v_BTHD = layer.values.transpose(1, 2)
            for row, chunk in enumerate(result):
                chunk.k[index].copy_(k_BTHD[row, : len(chunk.token_ids)])
                chunk.v[index].copy_(v_BTHD[row, : len(chunk.token_ids)])
        return result

    def check(self, chunks: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for a chunk that is empty or over-long, or has an id outside the vocabulary."""
        for index, ids in enumerate(chunks):
            if not 0 < len(ids) <= self.geometry.max_positions:
                raise ValueError(f"chunk {index} has {len(ids)} tokens; want 1 to {self.geometry.max_positions}")
            if not 0 <= min(ids) <= max(ids) < self.geometry.vocab_size:
                raise ValueError(f"chunk {index} has a token id outside 0..{self.geometry.vocab_size - 1}")


def load_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    """The target's tokenizer, without its weights."""
    return AutoTokenizer.from_pretrained(target_directory(settings))


def load_config(settings: Settings) -> PretrainedConfig:
    """The target's transformers config."""
    return AutoConfig.from_pretrained(target_directory(settings))


def target_device(target: TargetSettings) -> torch.device:
    """Device of the target's passes, `auto` resolved."""
    if target.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(target.device)


def target_dtype(settings: Settings) -> torch.dtype:
    """Compute dtype, `auto` resolved: float32 on CPU (bfloat16 needs AVX-512 to be usable), the checkpoint's on GPU."""
    if settings.target.dtype != "auto":
        return getattr(torch, settings.target.dtype)
    if target_device(settings.target).type == "cpu":
        return torch.float32
    return load_config(settings).dtype or torch.bfloat16


def target_directory(settings: Settings) -> str:
    """Local directory of the target's files; a hub id is downloaded at the pinned revision."""
    path = model_path(settings.target.model, settings)
    if Path(path).is_dir():
        return path
    return snapshot_download(path, revision=settings.target.revision, allow_patterns=_MODEL_FILES)


def target_fingerprint(settings: Settings) -> str:
    """Digest over weights, config, tokenizer, dtype and layout version; reads files, loads no model."""
    directory = Path(target_directory(settings))
    digest = hashlib.sha256(f"cachemend-target-v{FORMAT_VERSION}\n{target_dtype(settings)}\n".encode())
    config = json.loads((directory / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"no *.safetensors weights in {directory}")
    for file in [*weights, *(directory / name for name in ("tokenizer.json", "chat_template.jinja"))]:
        if file.is_file():
            stat = file.stat()
            digest.update(f"{file.name}\n{_file_sha256(str(file), stat.st_mtime_ns, stat.st_size)}\n".encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=64)
def _file_sha256(path: str, mtime_ns: int, size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
