# SPDX-License-Identifier: Apache-2.0
"""What the Repairer tells the autoscaling policy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from repair.registry import UnknownMethodError
from repair.types import MendRequest
from serve_app.repairer import RepairerDeployment
from tests.tiny import tiny_model_dir, tiny_settings

CHUNKS = (tuple(range(3, 30)), tuple(range(30, 100)))


async def test_what_falls_back_or_fails_is_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of seconds that ended without any work would look like work that takes no time."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    handoff = {"arena_bytes": 4096, "wait_s": 0.01}
    small = tiny_settings(tiny_model_dir(tmp_path), root=str(tmp_path / "data"), handoff=handoff)
    repairer = RepairerDeployment(small)
    result = await repairer.mend(MendRequest("a", "stale", CHUNKS, (1, 2)))
    assert (result.fallback, result.node) == ("handoff_too_large", "")
    with pytest.raises(UnknownMethodError):
        await repairer.mend(MendRequest("b", "magic", CHUNKS, (1, 2)))
    told = repairer.record_autoscaling_stats()
    assert told["service_s"] < 0 and told["arrivals"] == told["departures"] > 0
