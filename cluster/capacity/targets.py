# SPDX-License-Identifier: Apache-2.0
"""Target LLMs as the capacity model sees them: what a pass costs, how large its KV is, what repairing it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig

from kvcache.geometry import Geometry
from kvcache.settings import Settings
from kvcache.target import target_device, target_dtype
from repair.macs import CostModel
from repair.network import SIZES, RepairConfig


class UnknownTargetError(ValueError):
    """No sizes are known for the target; the message lists those that are."""


@dataclass(frozen=True)
class Target:
    """One target LLM and its repair network.

    Attributes:
        name: for people.
        geometry: sizes that shape the KV cache.
        cost: dense MACs of the target's passes (methods, section 0.6).
        network: sizes of the repair network.
        kv_item_bytes: bytes of a number of KV as computed, handed off and loaded.
        stored_item_bytes: bytes of a number of KV as stored, read and held in host memory.
        padded: prefixes are repaired at the next power of two, padding included (section 3.10), as published.
    """

    name: str
    geometry: Geometry
    cost: CostModel
    network: RepairConfig
    kv_item_bytes: int = 2
    stored_item_bytes: int = 2
    padded: bool = False

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the KV of that many tokens, as handed off."""
        return self._kv_items(tokens) * self.kv_item_bytes

    def stored_bytes(self, tokens: int) -> int:
        """Bytes of the chunk caches of that many tokens."""
        return self._kv_items(tokens) * self.stored_item_bytes

    def _kv_items(self, tokens: int) -> int:
        g = self.geometry
        return 2 * g.n_layers * g.n_kv_heads * g.head_dim * tokens

    def prefill_macs(self, rows: int, context: int) -> int:
        """`rows` tokens computed against `context` keys, through all layers, without the logits."""
        return self.cost.n_layers * self.cost.rows(rows, context)

    def repair_macs(self, tokens: int) -> int:
        """One repair of a prefix."""
        return self.network.macs(self.geometry, 1 << (tokens - 1).bit_length() if self.padded else tokens)


def _published(name: str, sizes: tuple[int, ...], network: RepairConfig) -> Target:
    layers, heads, kv_heads, width, ffn, vocabulary = sizes
    dim = 128
    qkv = width * dim * (heads + 2 * kv_heads)
    return Target(
        name,
        Geometry(layers, kv_heads, dim, heads, width, vocabulary, 32_768),
        CostModel(layers, qkv, qkv + heads * dim * width + 3 * width * ffn, 2 * heads * dim, vocabulary * width),
        network,
        padded=True,
    )


PUBLISHED = {
    "qwen2.5-3b": _published("Qwen2.5-3B", (36, 16, 2, 2048, 11_008, 151_936), SIZES["M"]),
    "llama-3.1-8b": _published("Llama-3.1-8B", (32, 32, 8, 4096, 14_336, 128_256), SIZES["M"]),
    "qwen2.5-14b": _published(
        "Qwen2.5-14B", (48, 40, 8, 5120, 13_824, 152_064), RepairConfig(d_b=640, n_blocks=6, n_heads=10, d_seg=16)
    ),
}
"""The targets of CacheRepair's tables, with its middle repair networks (section 3.5)."""


def find_target(name: str, settings: Settings) -> Target:
    """A published target by its name or hub id, or one whose config lies in a local folder; dtypes as the settings say.

    A local target's repair network is taken to have the smallest published sizes, as the one `cachemend train` makes.

    Args:
        name: `qwen2.5-3b`, `Qwen/Qwen2.5-3B-Instruct`, or a folder, alone or below `models_dir`.
        settings: `models_dir`, and the dtypes and the device of `target` and `store`.

    Raises:
        UnknownTargetError: neither a published name nor a folder with a config.
        UnsupportedTargetError: the folder's model is of another architecture.
    """
    folder = next((f for f in (Path(name), Path(settings.models_dir) / name) if (f / "config.json").is_file()), None)
    known = PUBLISHED.get(name.lower() if folder else _last_part(name))
    if known:
        return _in_dtypes(known, settings, torch.bfloat16)
    if folder is None:
        raise UnknownTargetError(f"target {name!r}: name a folder with a config.json, or one of {', '.join(PUBLISHED)}")
    config = AutoConfig.from_pretrained(folder)
    found = Target(Path(name).name, Geometry.of(config), CostModel.of(config), SIZES["S"])
    return _in_dtypes(found, settings, config.dtype or torch.bfloat16)


def _last_part(hub_id: str) -> str:
    return hub_id.rpartition("/")[2].lower().removesuffix("-instruct")


def _in_dtypes(target: Target, settings: Settings, checkpoint: torch.dtype) -> Target:
    # `target_dtype` would look into the checkpoint's config, and fetch the checkpoint for it.
    own = settings.target.dtype == "auto" and target_device(settings.target).type != "cpu"
    computed = checkpoint if own else target_dtype(settings)
    stored = computed if settings.store.dtype == "auto" else getattr(torch, settings.store.dtype)
    return replace(target, kv_item_bytes=computed.itemsize, stored_item_bytes=stored.itemsize)
