# SPDX-License-Identifier: Apache-2.0
"""Repairers and engines on as many GPUs as there are."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

from kvcache.settings import Settings
from serve_app.app import bind


def parts(monkeypatch: pytest.MonkeyPatch, gpus: int, **serve: int) -> dict[str, Any]:
    """Deployments behind the ingress, bound where there are that many GPUs."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    ingress = bind(Settings(repair={"methods": ["stale"]}, serve=serve))._bound_deployment
    bound = [part._bound_deployment for part in ingress.init_args if hasattr(part, "_bound_deployment")]
    return {part.name: part for part in bound}


@pytest.mark.parametrize(("gpus", "replicas"), [(0, 1), (1, 1), (2, 1), (2, 2), (4, 2)])
def test_what_shares_a_gpu_asks_for_no_more_memory_than_its_share(
    monkeypatch: pytest.MonkeyPatch, gpus: int, replicas: int
) -> None:
    found = parts(monkeypatch, gpus, repairer_replicas=replicas, engine_replicas=replicas)
    taken = {name: found[name].ray_actor_options["num_gpus"] for name in ("Repairer", "Engine")}
    shared = 0 < gpus < 2 * replicas
    assert set(taken.values()) == ({0.5} if shared else {min(gpus, 1)})
    (settings,) = found["Engine"].init_args
    assert settings.engine.gpu_memory_utilization == pytest.approx(0.85 / 2 if shared else 0.85)
