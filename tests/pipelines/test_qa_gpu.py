# SPDX-License-Identifier: Apache-2.0
"""The batch job's engine on a GPU where the target lies already."""

from __future__ import annotations

import pytest
import torch

from kvcache.settings import Settings
from pipelines.qa.answerer import beside


@pytest.mark.parametrize(("taken", "share"), [(0.0, 0.85), (6.5, 0.85 - 6.5 / 22)])
def test_the_engine_s_share_is_less_by_what_lies_there_already(
    monkeypatch: pytest.MonkeyPatch, taken: float, share: float
) -> None:
    total = 22 * 2**30
    free = total - int(taken * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    asked = beside(torch.device("cuda"), Settings()).engine.gpu_memory_utilization
    assert asked == pytest.approx(share)
    assert asked * total <= free  # or vLLM does not start


def test_an_engine_on_a_cpu_keeps_its_settings() -> None:
    assert beside(torch.device("cpu"), Settings()) == Settings()
