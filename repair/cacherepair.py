# SPDX-License-Identifier: Apache-2.0
"""CacheRepair: an external network predicts what the chunk caches lack and adds it (methods, section 3)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import nn

from kvcache.chunk import ChunkKV
from kvcache.models import ModelNotFoundError, model_path
from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair.base import MethodParamsError, RepairedPrefix, RepairRequest, joined
from repair.checkpoint import load_network, locate
from repair.checkpoint_config import CONFIG_FILE, CheckpointError, embedding_digest, read_config
from repair.visibility import Visibility

SHIPPED = {"smollm2-135m-instruct": "S"}
"""Targets with a repair network in this package, and its size: `weights/<target>/<size>`."""

_PARTS = ("kv", "k", "v")


class QualityError(CheckpointError):
    """A repair network that is no better than stale KV must not serve."""


class CacheRepair:
    """Adds the predicted residual to the stale KV of every token; the target LLM does not run.

    A prefix of one chunk lacks nothing and is passed through.

    Method parameters:
        parts: "kv" (default), or "k" or "v" to repair keys or values only (for ablations: half a repair is worse than
            none).
        keep_first: leave the first chunk, which nothing comes before, as it is (default false, as published).

    Attributes:
        network: the repair network.
    """

    name: ClassVar[str] = "cacherepair"
    needs_stale: ClassVar[bool] = True
    needs_query: ClassVar[bool] = False
    needs_target: ClassVar[bool] = False

    def __init__(self, target: TargetLLM, settings: Settings) -> None:
        """Load the network that `settings.repair.cacherepair` names, onto the target's device.

        Raises:
            CheckpointError: there is none, or it is damaged or made for another target.
            QualityError: by its own account it is no better than stale KV, and `settings.repair.force` is off.
        """
        directory = locate(settings.repair.cacherepair or shipped(settings.target.model))
        self.network = load_network(directory, target.model.get_input_embeddings(), target, target.device)
        if not settings.repair.force:
            check_quality(directory)

    def check_params(self, params: Mapping[str, Any]) -> None:
        """Takes `parts` and `keep_first`, see the class."""
        if unknown := sorted(params.keys() - {"parts", "keep_first"}):
            raise MethodParamsError(f"method {self.name!r} takes parts and keep_first, not {', '.join(unknown)}")
        if params.get("parts", "kv") not in _PARTS:
            raise MethodParamsError(f"parts must be one of {', '.join(_PARTS)}, got {params['parts']!r}")
        if not isinstance(params.get("keep_first", False), bool):
            raise MethodParamsError(f"keep_first must be true or false, got {params['keep_first']!r}")

    def repair(self, request: RepairRequest) -> RepairedPrefix:
        """Mend one prefix."""
        return self.repair_batch([request])[0]

    @torch.inference_mode()
    def repair_batch(self, requests: Sequence[RepairRequest]) -> list[RepairedPrefix]:
        """Mend several prefixes in one pass, laid end to end: each comes out as if alone, to rounding.

        Each prefix's `stages` are those of the pass: transfer (to the device and back, in packed order), mask, repair.
        """
        lacking = [request for request in requests if len(request.chunks) > 1]
        if not lacking:
            return [_assemble(request, None, {}) for request in requests]
        device = self.network.device
        times = [time.perf_counter()]
        packed = _pack([chunk for request in lacking for chunk in request.stale], device)
        tokens = torch.tensor([token for request in lacking for token in joined(request.chunks)], device=device)
        times.append(time.perf_counter())
        lengths = [[len(ids) for ids in request.chunks] for request in lacking]
        visibility = Visibility.of(lengths, self.network.config.attention, device)
        times.append(time.perf_counter())
        # Serving precision on GPU is bfloat16; the residual is added in float32.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            self.network.repair_packed_(packed, tokens, visibility)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())
        packed = packed.cpu()
        times.append(time.perf_counter())
        transfer, mask, repair, back = (b - a for a, b in pairwise(times))
        stages = {"transfer": transfer + back, "mask": mask, "repair": repair}
        rows = iter(packed.split([sum(each) for each in lengths]))
        return [
            _assemble(request, next(rows), stages, self._macs(request))
            if len(request.chunks) > 1
            else _assemble(request, None, {})
            for request in requests
        ]

    def _macs(self, request: RepairRequest) -> int:
        return self.network.config.macs(self.network.geometry, sum(map(len, request.chunks)))


def shipped(target_model: str) -> Path:
    """Folder of the repair network shipped for a target.

    Raises:
        CheckpointError: there is none.
    """
    name = Path(target_model).name
    folder = Path(__file__).parent / "weights" / name / SHIPPED.get(name, "")
    if name not in SHIPPED or not folder.is_dir():
        raise CheckpointError(
            f"no repair network is shipped for target {target_model!r}: "
            "set repair.cacherepair to the folder or hub id of one (`cachemend train` makes one)"
        )
    return folder


def network_at_hand(settings: Settings) -> bool:
    """Whether a repair network is configured, or one is shipped that was trained for exactly this target.

    Copies of a model differ: that of the hub is not the 4-bit one the shipped network knows.
    """
    if settings.repair.cacherepair:
        return True
    try:
        directory = shipped(settings.target.model)
        file = Path(model_path(settings.target.model, settings)) / "model.safetensors"
    except (CheckpointError, ModelNotFoundError):  # none is shipped, or the target has not been fetched
        return False
    if not file.is_file():
        return False
    config = read_config(directory)  # a shipped network that is damaged is an error, not an absent one
    with safe_open(file, framework="pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight")
    return config.target_embedding_sha256 == embedding_digest(nn.Embedding.from_pretrained(table))


def check_quality(directory: Path) -> None:
    """Refuse a network whose validation error is not below stale's; one without that account is let through.

    Raises:
        QualityError: names file, field and both numbers.
    """
    validation = read_config(directory).training.get("validation")
    if validation is None:
        return
    try:
        error, stale = float(validation["normalized_mse"]), float(validation["stale_normalized_mse"])
    except (TypeError, KeyError, ValueError):
        raise QualityError(
            f"{directory / CONFIG_FILE}: training.validation needs the numbers normalized_mse and stale_normalized_mse"
        ) from None
    if not error < stale:
        raise QualityError(
            f"{directory / CONFIG_FILE}: training.validation.normalized_mse {error} is not below stale's {stale}: "
            "this network does not help (repair.force serves it all the same)"
        )


def _pack(chunks: Sequence[ChunkKV], device: torch.device) -> torch.Tensor:
    """Chunks end to end as float32 `[N, L, H, 2, D]` on the device; one pass over the bytes in host memory."""
    layers, _, heads, head_dim = chunks[0].k.shape
    n = sum(len(chunk.token_ids) for chunk in chunks)
    on_cpu = device.type == "cpu"
    # Over the bus in the store's dtype, which is often half as wide.
    dtype = torch.float32 if on_cpu else chunks[0].k.dtype
    packed = torch.empty(n, layers, heads, 2, head_dim, dtype=dtype, pin_memory=not on_cpu)
    start = 0
    for chunk in chunks:
        rows = packed[start : start + len(chunk.token_ids)].transpose(0, 1)
        rows[..., 0, :].copy_(chunk.k)
        rows[..., 1, :].copy_(chunk.v)
        start += len(chunk.token_ids)
    return packed.to(device, torch.float32)


def _assemble(
    request: RepairRequest, rows: torch.Tensor | None, stages: Mapping[str, float], macs: int = 0
) -> RepairedPrefix:
    """A prefix of views: repaired rows `[T, L, H, 2, D]` where asked for, stale KV elsewhere."""
    parts, keep_first = request.params.get("parts", "kv"), request.params.get("keep_first", False)
    pieces, start = [], 0
    for index, chunk in enumerate(request.stale):
        k, v = chunk.k, chunk.v
        if rows is not None and not (keep_first and index == 0):
            mended = rows[start : start + len(chunk.token_ids)].transpose(0, 1)
            k = mended[..., 0, :] if "k" in parts else k
            v = mended[..., 1, :] if "v" in parts else v
        pieces.append((k, v))
        start += len(chunk.token_ids)
    return RepairedPrefix(joined(request.chunks), tuple(pieces), stages, macs)
