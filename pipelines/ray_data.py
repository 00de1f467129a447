# SPDX-License-Identifier: Apache-2.0
"""What the Ray Data jobs have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray.data

Progress = Callable[[str, int, int | None], None]
"""Told (stage, done, total); total None while unknown."""


@contextmanager
def quiet_ray_data() -> Iterator[None]:
    """Without Ray Data's own progress bars: the caller shows one of its own."""
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars
    context.enable_progress_bars = False
    try:
        yield
    finally:
        context.enable_progress_bars = before
