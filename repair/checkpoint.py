# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of repair networks in the published format: a folder with `config.json` and `model.safetensors`.

Reading is strict where a mistake would give wrong answers (geometry, rotary embedding, tensors) and lenient to keys of
`repair_config` and `training` that we do not know.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from kvcache.target import TargetLLM
from repair.checkpoint_config import (
    CONFIG_FILE,
    FORMAT,
    CheckpointConfig,
    CheckpointError,
    RopeSpec,
    TargetConfig,
    check_embedding,
    check_target,
    embedding_digest,
    read_config,
)
from repair.network import RepairNetwork

WEIGHTS_FILE = "model.safetensors"
_SHARED = "tok_embed.weight"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def save_checkpoint(
    network: RepairNetwork,
    directory: str | Path,
    target: TargetLLM,
    *,
    target_model_id: str,
    capacity: str,
    training: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a checkpoint; a previous one there is replaced only when both files are whole on the disk.

    Args:
        network: what to save.
        directory: made when it does not exist.
        target: the target it was trained for.
        target_model_id: hub id or name, for people; never a path.
        capacity: name of the size, such as "S".
        training: facts about the training, JSON values. `training["validation"]`, where there,
            is `{"normalized_mse", "stale_normalized_mse"}`: the service refuses a network that is not below stale.
        dtype: of the weights; the published format is float32, and the sigmas always are.

    Raises:
        CheckpointError: the files cannot be written (disk full, no permission) or a tensor is not finite.
    """
    directory = Path(directory)
    tensors = {}
    for name, tensor in network.state_dict().items():
        if name != _SHARED:
            tensors[name] = tensor.detach().cpu().to(torch.float32 if name.startswith("sigma") else dtype).contiguous()
            _check_finite(directory / WEIGHTS_FILE, name, tensors[name])
    weights = save(tensors, {"format": FORMAT})
    config = CheckpointConfig(
        target_model_id=target_model_id,
        capacity=capacity,
        repair_config=network.config,
        target_config=TargetConfig.of(target.model.config),
        target_rope_spec=RopeSpec.of(target.rotary),
        target_embedding_sha256=embedding_digest(target.model.get_input_embeddings()),
        weights_sha256=hashlib.sha256(weights).hexdigest(),
        repair_attention=network.config.attention,
        training=dict(training or {}),
    )
    document = config.model_dump()
    del document["repair_config"]["attention"]  # it is `repair_attention`
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    _replace_files(directory, {WEIGHTS_FILE: weights, CONFIG_FILE: text.encode()})


def load_network(
    directory: str | Path, embedding: nn.Embedding, target: TargetLLM | None = None, device: torch.device | None = None
) -> RepairNetwork:
    """Load a checkpoint.

    Args:
        directory: its folder.
        embedding: the target's input embedding; compared where the checkpoint has its digest.
        target: when given, the checkpoint must have been made for it: geometry and rotary embedding are compared.
        device: where the network goes; None is the embedding's.

    Returns:
        The network, in evaluation mode, float32.

    Raises:
        CheckpointError: see the module.
    """
    path = Path(directory) / CONFIG_FILE
    config = read_config(directory)
    if target is not None:
        check_target(path, config, target)
    check_embedding(path, config, embedding)
    geometry = target.geometry if target is not None else config.target_config.geometry(embedding.num_embeddings)
    with torch.device("meta"):
        network = RepairNetwork(config.network_config, geometry, embedding)
    weights = Path(directory) / WEIGHTS_FILE
    network.load_state_dict(_read_tensors(weights, network), strict=False, assign=True)
    # Two files are not replaced as one: what the account in the one says must be of the tensors in the other.
    if config.weights_sha256 and (found := _digest(weights)) != config.weights_sha256:
        raise CheckpointError(f"{path}: weights_sha256 is {config.weights_sha256}, {weights} is {found}: not a pair")
    return network.to(device or embedding.weight.device).eval()


def load_repairer(directory_or_hub_id: str | Path, target: TargetLLM, subfolder: str | None = None) -> RepairNetwork:
    """Load a repair network for a target, onto the target's device.

    Args:
        directory_or_hub_id: a checkpoint's folder, or a hub id, with or without a folder behind it
            (`owner/name/Qwen2.5-3B-Instruct/M`).
        target: the target LLM.
        subfolder: folder of the checkpoint within the above.

    Raises:
        CheckpointError: nothing there, damaged, or made for another target.
    """
    directory = locate(directory_or_hub_id, subfolder)
    return load_network(directory, target.model.get_input_embeddings(), target, target.device)


def locate(directory_or_hub_id: str | Path, subfolder: str | None = None) -> Path:
    """Local folder of a checkpoint; one on the hub is downloaded."""
    path = Path(directory_or_hub_id) / (subfolder or "")
    if path.is_dir():
        return path
    owner, *rest = [*Path(directory_or_hub_id).parts, *Path(subfolder or "").parts]
    if not rest or owner in ("/", ".", "..", "~"):
        raise CheckpointError(f"{path}: no such folder, and not a hub id (owner/name)")
    folder = "/".join(rest[1:])
    patterns = [f"{folder}/{name}".lstrip("/") for name in (CONFIG_FILE, WEIGHTS_FILE)]
    try:
        found = Path(snapshot_download(f"{owner}/{rest[0]}", allow_patterns=patterns)) / folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{path}: no such folder, and the hub does not give {owner}/{rest[0]}: {error}") from None
    if not found.is_dir():
        raise CheckpointError(f"{path}: the hub's {owner}/{rest[0]} has no folder {folder!r} with a checkpoint")
    return found


def _read_tensors(path: Path, network: RepairNetwork) -> dict[str, torch.Tensor]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    want = {name: tensor.shape for name, tensor in network.state_dict().items() if name != _SHARED}
    if missing := sorted(want.keys() - tensors.keys()):
        raise CheckpointError(f"{path}: tensors are missing: {', '.join(missing[:8])} ({len(missing)} in all)")
    if extra := sorted(tensors.keys() - want.keys()):
        raise CheckpointError(f"{path}: tensors that do not belong: {', '.join(extra[:8])} ({len(extra)} in all)")
    for name, tensor in tensors.items():
        if tensor.shape != want[name]:
            raise CheckpointError(f"{path}: tensor {name} is {list(tensor.shape)}, want {list(want[name])}")
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}, want a float")
        tensors[name] = tensor.float()
        _check_finite(path, name, tensors[name])
        if name.startswith("sigma") and not (tensor > 0).all():
            raise CheckpointError(f"{path}: tensor {name} has values that are not positive")
    return tensors


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_finite(path: Path, name: str, tensor: torch.Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: tensor {name} has values that are not finite (NaN or infinity)")


def _replace_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write all files beside their places, then move them: a full disk leaves what was there."""
    written: dict[Path, Path] = {}
    path = directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            path = directory / name
            temporary = directory / f".{name}.{os.getpid()}"
            written[temporary] = path
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in written.items():
            os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}; what was there is untouched") from error
    finally:
        for temporary in written:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
