# SPDX-License-Identifier: Apache-2.0
"""The Ray Serve application: `serve run serve_app:app`, or `serve_app:build_app` with settings as arguments."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Lazy: importing a module of this package must not read settings, nor import vLLM.
    if name == "build_app":
        from serve_app.app import build_app

        return build_app
    if name == "app":
        from serve_app.app import AppArgs, build_app

        return build_app(AppArgs())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
