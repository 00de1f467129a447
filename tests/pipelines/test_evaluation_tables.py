# SPDX-License-Identifier: Apache-2.0
"""From rows to tables: bootstrap intervals, the half-budget choice, KV errors added up by hand."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

from pipelines.evaluation.bootstrap import paired_difference
from pipelines.evaluation.charts import kv_error_maps
from pipelines.evaluation.kv_error import add, normalised_mse, relative_rms, square_sums
from pipelines.evaluation.summary import MEANS, half_budget, summarise
from pipelines.training.statistics import Statistics


def test_the_interval_of_a_mean_is_that_of_normal_theory() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=400)
    a, b = noise + rng.normal(0.3, 0.5, 400), noise  # what both share must cancel out
    found = paired_difference(a, b)
    error = np.std(a - b) / math.sqrt(400)
    z = NormalDist().inv_cdf(0.975)
    assert found.difference == pytest.approx(np.mean(a - b))
    assert found.low == pytest.approx(found.difference - z * error, abs=0.15 * error)
    assert found.high == pytest.approx(found.difference + z * error, abs=0.15 * error)
    assert found.requests == 400


def test_the_interval_of_a_median_covers_the_true_difference() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(2.0, 1.0, 300), rng.normal(0.0, 1.0, 300)
    found = paired_difference(a, b, "median")
    assert found.difference == pytest.approx(np.median(a) - np.median(b))
    # Two independent medians of normals: sqrt(pi / 2 n) each.
    width = 2 * NormalDist().inv_cdf(0.975) * math.sqrt(2 * math.pi / (2 * 300))
    assert found.low < 2.0 < found.high
    assert found.high - found.low == pytest.approx(width, rel=0.3)


def test_intervals_are_the_same_each_time_and_zero_for_equals() -> None:
    values = np.random.default_rng(2).normal(size=25)
    assert paired_difference(values, values[::-1]) == paired_difference(values, values[::-1])
    same = paired_difference(values, values)
    assert (same.difference, same.low, same.high) == (0, 0, 0)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0])])
def test_intervals_need_pairs(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="equally long, non-empty"):
        paired_difference(a, b)


def method(family: str, ms: float, macs: float) -> dict:
    return {"family": family, "ttft_ms": {"p50": ms}, "macs": macs}


def test_each_family_takes_its_largest_preset_within_half_of_full() -> None:
    methods = {
        "full": method("full", 100, 1000),
        "stale": method("stale", 20, 1),
        "a:r=1": method("a", 30, 10),
        "a:r=2": method("a", 50, 20),
        "a:r=3": method("a", 51, 30),  # just over
        "a:r=4": method("a", 40, 15),
        "b": method("b", 90, 400),
        "c:x=1": method("c", 33, 7),
        "c:x=2": method("c", 31, 7),  # as large as the first
        "d:half=1": method("d", 33, 7),  # an ablation, as large as the whole
        "d": method("d", 33, 7),
    }
    assert half_budget(methods) == {"stale": "stale", "a": "a:r=2", "b": None, "c": "c:x=1", "d": "d"}


def test_regions_by_hand() -> None:
    """One layer, two heads; the error is 1 everywhere in the first chunk, 2 at boundaries, 3 inside; in K of head 0."""
    lengths = (3, 10, 8)  # 8 tokens of each later chunk are its boundary
    error = torch.zeros(21, 1, 2, 2, 4)
    error[:3, 0, 0, 0] = 1.0
    error[3:11, 0, 0, 0] = 2.0
    error[11:13, 0, 0, 0] = 3.0
    error[13:, 0, 0, 0] = 2.0
    joint = torch.full_like(error, 10.0)
    found = relative_rms(square_sums(error, lengths), square_sums(joint, lengths))
    half = math.sqrt(0.5)  # one head of two
    assert found["k"]["by_region"] == pytest.approx(
        {
            "first": 0.1 * half,
            "boundary": 0.2 * half,
            "interior": 0.3 * half,
            "all": math.sqrt((3 * 1 + 16 * 4 + 2 * 9) / (2 * 21 * 100)),
        }
    )
    assert set(found["v"]["by_region"].values()) == {0.0}
    assert found["k"]["by_layer_head"] == [[pytest.approx(math.sqrt(85 / 2100)), 0.0]]
    assert found["k"]["by_head"] == found["k"]["by_layer_head"][0]
    # Distances 0, 1, 2-3, 4-7 from the start of chunks 1 and 2 are 2 off, 8-15 (two tokens of chunk 1) are 3 off.
    assert found["k"]["by_distance"] == pytest.approx([0.2 * half] * 4 + [0.3 * half] + [None] * 4)
    assert found["k"]["by_position"] == pytest.approx([math.sqrt(85 / 4200)])


def test_sums_of_several_requests() -> None:
    short, long = torch.ones(5, 1, 1, 2, 2), torch.full((130, 1, 1, 2, 2), 2.0)
    total = add([square_sums(short, (2, 3)), square_sums(long, (2, 128))])
    assert total["position"].tolist() == [[5 * 2 + 128 * 8] * 2, [2 * 8] * 2]
    assert total["layer_head"].sum() == 5 * 4 + 130 * 16
    assert relative_rms(total, total)["v"]["by_region"]["boundary"] == 1.0


def test_the_normalised_error_by_hand() -> None:
    sigma = torch.tensor([[[[2.0, 1e-6], [4.0, 1e-6]]]])  # [L, H, 2, D]; two coordinates at the floor
    statistics = Statistics(sigma_stale=torch.full_like(sigma, 1e-3), sigma_delta=sigma, floor=1e-3)
    error = torch.tensor([[[[[2.0, 9.0], [4.0, 9.0]]]], [[[[4.0, 9.0], [0.0, 9.0]]]]])
    assert normalised_mse(error, statistics) == pytest.approx((1 + 1 + 4 + 0) / 4)


def row(value: float, kv: bool, full: bool = False) -> dict:
    error, joint = torch.full((4, 1, 1, 2, 2), value), torch.ones(4, 1, 1, 2, 2)
    metrics = dict.fromkeys((*MEANS, "ttft_ms", "repair_ms", "kv_bytes"), value)
    found = {"metrics": metrics, "attention": [value, 2 * value], "shares": {"recomputed": value}, "kv_error": None}
    listed = lambda sums: {name: each.tolist() for name, each in sums.items()}  # noqa: E731
    if kv:
        found["kv_error"] = listed(square_sums(error, (2, 2)))
    else:
        metrics |= dict.fromkeys(("kv_mse_normalized", "k_rmse", "v_rmse"))
    if full:
        found["kv_joint"] = listed(square_sums(joint, (2, 2)))
    return found


def test_the_summary_of_made_up_rows() -> None:
    rows = {
        "full": [row(0.0, True, full=True)] * 4,
        "stale": [row(x, True) for x in (1.0, 2.0, 3.0, 6.0)],
        "other": [row(x, False) for x in (1.0, 1.0, 1.0, 1.0)],
    }
    found = summarise(rows, {name: name for name in rows}, dict.fromkeys(rows, 17))
    stale, other = found["methods"]["stale"], found["methods"]["other"]
    assert found["requests"] == 4
    assert (stale["f1"], stale["macs"], stale["ttft_ms"]) == (3.0, 3.0, {"p50": 2.5, "p90": pytest.approx(5.1)})
    assert stale["memory"] == {"kv_bytes": 3.0, "parameter_bytes": 17}
    assert stale["attention_error_by_layer"] == [3.0, 6.0]
    assert stale["shares"] == {"recomputed": 3.0}
    assert stale["kv_error"]["k"]["by_region"]["all"] == pytest.approx(math.sqrt((1 + 4 + 9 + 36) / 4))
    assert (other["kv_error"], other["kv_mse_normalized"], other["f1"]) == (None, None, 1.0)
    intervals = found["intervals"]["other"]
    assert intervals["f1"]["to_stale"]["difference"] == -2.0
    assert intervals["f1"]["to_full"] == {"difference": 1.0, "low": 1.0, "high": 1.0, "requests": 4}
    assert intervals["ttft_ms"]["to_stale"]["difference"] == -1.5
    assert "k_rmse" not in intervals


def test_errors_are_drawn_by_layer_and_head_position_distance_and_region(tmp_path: Path) -> None:
    part = {
        "by_layer_head": [[0.1, 0.2], [0.3, None]],
        "by_position": [0.1, 0.2],
        "by_distance": [0.3] * 5 + [None] * 4,
        "by_region": {"first": None, "boundary": 0.4, "interior": 0.2, "all": 0.3},
    }
    longer = {**part, "by_position": [0.1, 0.2, 0.3]}
    methods = {
        "full": {"kv_error": {"k": part, "v": part}},
        "stale": {"kv_error": {"k": part, "v": part}},
        "epic": {"kv_error": {"k": longer, "v": longer}},
        "infoflow": {"kv_error": None},
    }
    assert kv_error_maps({"methods": methods}, "title", tmp_path / "maps.png")
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")
    assert not kv_error_maps({"methods": {"full": methods["full"]}}, "title", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
