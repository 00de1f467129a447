# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import pytest
import torch

from kvcache.target import TargetLLM
from tests.tiny import tiny_target

torch.set_num_threads(2)
# A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TargetLLM:
    """A tiny random Llama."""
    return tiny_target(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def ray_alone():
    """A Ray cluster of this test module only."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def one_thread():
    """These passes are too small to share between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
