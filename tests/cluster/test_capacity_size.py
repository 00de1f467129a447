# SPDX-License-Identifier: Apache-2.0
"""What a plan grows, what it simulates in a slice, and what the dtypes of target and store do to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from cluster.capacity import published, size
from cluster.capacity.demand import Demand, Hardware, hit_rate
from cluster.capacity.model import Cluster, Open
from cluster.capacity.simulation import simulate
from cluster.capacity.size import Sizer
from cluster.capacity.targets import PUBLISHED, find_target
from kvcache.settings import Settings

TARGET = PUBLISHED["qwen2.5-3b"]
WORK = replace(published.WORKLOAD, top_k=6)


def test_what_is_short_is_what_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in five seconds keeps no engine busy, but few nodes hold too few of the chunks for the bound."""
    monkeypatch.setattr(size, "_REQUESTS", 300)
    chunks, nodes, hardware = 10**7, 20, Hardware()
    stages = replace(published.PRIOR, retrieval_s=hardware.retrieval_s(chunks))
    held = nodes * hardware.host_bytes / (512 * 36_864)
    hits = hit_rate(held, chunks, 0.9)
    cluster = Cluster(8, nodes, 8, hardware.max_num_seqs, host_hit_rate=hits, hop_bytes_per_s=hardware.hop_bytes_per_s)
    bound_s = simulate("stale", Open(1e-3), TARGET, WORK, stages, cluster, requests=300, lead_in=30).ttft(95)

    def plan(ttft_s: float) -> size.Plan:
        return Sizer(TARGET, WORK, published.PRIOR, hardware).size("stale", Demand(0.2, chunks, ttft_s))

    loose, tight = plan(1.0), plan(bound_s)
    assert tight.p95_ttft_s <= bound_s < loose.p95_ttft_s
    assert loose.repairers < nodes / 2 <= tight.repairers <= 1.5 * nodes
    assert tight.engines <= 2 and tight.retrievers == 1


def test_a_large_cluster_is_simulated_as_if_it_were_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many engines with long answers behind one retriever and one repair node that have little to do."""
    monkeypatch.setattr(size, "_REQUESTS", 300)
    work = replace(WORK, output_tokens=200, fixed_outputs=True)
    slow = replace(published.PRIOR, step_s=0.4, repair_macs_per_s=published.PRIOR.repair_macs_per_s / 4)
    hardware, rate = Hardware(embed_s=0.2, max_num_seqs=8), 1.4
    plan = Sizer(TARGET, work, slow, hardware).size("repaired", Demand(rate, 1000, 5.0))
    assert plan.engines > 2 * 8 and (plan.retrievers, plan.repairers) == (1, 1)
    whole = Cluster(plan.engines, 1, 1, hardware.max_num_seqs, hardware.batch_tokens, hop_bytes_per_s=12e9)
    slow = replace(slow, retrieval_s=hardware.retrieval_s(1000))
    seen = simulate("repaired", Open(rate), TARGET, work, slow, whole, requests=300, lead_in=30)
    assert plan.p95_ttft_s == pytest.approx(seen.ttft(95), rel=0.1)


def test_a_smaller_store_takes_less_of_what_holds_and_reads_it_and_no_less_of_the_hop() -> None:
    demand = Demand(20, 10**7, 1.0)
    one, half = (
        Sizer(replace(TARGET, stored_item_bytes=items), WORK, published.PRIOR, Hardware()).size("stale", demand)
        for items in (2, 1)
    )
    assert half.storage_bytes == one.storage_bytes / 2
    assert half.host_hit_rate > one.host_hit_rate
    assert half.storage_bytes_per_s < one.storage_bytes_per_s / 2
    assert half.hop_bytes_per_s == one.hop_bytes_per_s


@pytest.mark.parametrize(
    ("target", "store", "handed", "stored"),
    [
        ({"device": "cpu"}, "auto", 4, 4),
        ({"device": "cpu"}, "float16", 4, 2),
        ({"device": "cuda"}, "auto", 2, 2),  # the checkpoint's own, bfloat16
        ({"device": "cuda"}, "float32", 2, 4),
        ({"device": "cuda", "dtype": "float32"}, "auto", 4, 4),
        ({"device": "cpu", "dtype": "bfloat16"}, "float16", 2, 2),
    ],
)
@pytest.mark.parametrize(
    ("name", "numbers"), [("local", 2 * 3 * 2 * 16), ("Qwen/Qwen2.5-3B-Instruct", 2 * 36 * 2 * 128)]
)
def test_kv_is_as_large_as_the_dtypes_of_target_and_store_make_it(
    tmp_path: Path, name: str, numbers: int, target: dict[str, str], store: str, handed: int, stored: int
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    config = LlamaConfig(**heads, num_hidden_layers=3, intermediate_size=96, vocab_size=100, dtype="bfloat16")
    config.save_pretrained(tmp_path / "local")
    found = find_target(name, Settings(models_dir=str(tmp_path), target=target, store={"dtype": store}))
    assert (found.kv_bytes(10), found.stored_bytes(10)) == (10 * numbers * handed, 10 * numbers * stored)


@pytest.mark.parametrize("name", ["qwen2.5-3b", "QWEN2.5-3B", "Qwen/Qwen2.5-3B-Instruct", "anyone/Qwen2.5-3B"])
def test_a_published_target_is_known_by_its_hub_id(name: str) -> None:
    assert find_target(name, Settings(target={"device": "cuda"})) == TARGET
