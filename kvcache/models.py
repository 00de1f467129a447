# SPDX-License-Identifier: Apache-2.0
"""Where models lie on this machine."""

from __future__ import annotations

from pathlib import Path

from kvcache.settings import Settings


class ModelNotFoundError(FileNotFoundError):
    """A named model is not on this machine."""


def model_path(name: str, settings: Settings) -> str:
    """Resolve a model name to what `from_pretrained` takes: a local directory, or a hub id left as it is.

    Raises:
        ModelNotFoundError: a bare name (no slash) that has not been fetched.
    """
    for candidate in (Path(name), Path(settings.models_dir) / name):
        if (candidate / "config.json").is_file():
            return str(candidate.resolve())
    if "/" in name and not name.startswith((".", "/")):
        return name
    raise ModelNotFoundError(f"model {name!r} is not in {settings.models_dir}: run `cachemend models fetch`")
