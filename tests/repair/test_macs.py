# SPDX-License-Identifier: Apache-2.0
"""The cost model against the published counts (CacheRepair Table 19: Qwen2.5-3B, 16 chunks, 16,384 tokens)."""

from __future__ import annotations

import pytest
from transformers import Qwen2Config

from kvcache.geometry import Geometry
from repair.macs import CostModel
from repair.network import SIZES

QWEN_3B = Qwen2Config(
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    hidden_size=2048,
    intermediate_size=11_008,
    vocab_size=151_936,
)
COST = CostModel.of(QWEN_3B)
N, Q = 16_384, 61
T, TENTH = N + Q, N // 10
QUERY = COST.query(N, Q)

PUBLISHED = {
    "full": (85.51, COST.full(N, Q)),
    "stale": (0.32, QUERY),
    "cacherepair": (3.42, SIZES["L"].macs(Geometry.of(QWEN_3B), N) + QUERY),
    # Layer 0 in full, layer 1's queries, keys and values for all, the selected ones from layer 1's attention on.
    "cacheblend": (11.05, COST.selective([N] + [TENTH] * 35, T, projected=N - TENTH) + QUERY),
    "epic": (1.65, COST.selective([16 * 16] * 36, T) + QUERY),
    # Layer 0 in full, and the question once more, to score.
    "infoflow": (11.37, COST.selective([N] + [TENTH] * 35, T, probe=36 * COST.rows(Q, T)) + QUERY),
}


@pytest.mark.parametrize("method", PUBLISHED)
def test_published_counts(method):
    tera, macs = PUBLISHED[method]
    assert macs / 1e12 == pytest.approx(tera, rel=0.01)


def test_recomputing_every_row_costs_what_full_prefill_costs():
    assert COST.selective([N] * 36, T) + QUERY == COST.full(N, Q)


def test_a_sparse_context_saves_its_scores_and_weighted_sums():
    dense, sparse = COST.selective([100] * 36, N), COST.selective([100] * 36, [N // 2] * 36)
    assert dense - sparse == 36 * 100 * (N // 2) * 2 * 16 * 128
