# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the repair tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_passes(one_thread: None) -> None:
    """All of these run on one thread."""
