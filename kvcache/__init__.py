# SPDX-License-Identifier: Apache-2.0
"""The ground floor: shapes and rotary, the target LLM, the object store, the host-memory tier, the hand-off."""

from typing import Any

_PUBLIC = {
    "TargetLLM": "kvcache.target",
    "compile_stale": "kvcache.compile",
    "materialize": "kvcache.compile",
    "to_hf_cache": "kvcache.compile",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    # Lazy, so that reading the settings does not import torch.
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
