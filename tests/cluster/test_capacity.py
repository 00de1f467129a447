# SPDX-License-Identifier: Apache-2.0
"""The capacity model against queueing theory, the published load test, and itself."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace
from math import factorial
from pathlib import Path

import numpy as np
import pytest
import simpy
from typer.testing import CliRunner

from cachemend.cli import app
from cluster.capacity import published
from cluster.capacity.breakeven import NothingSavedError, break_even_requests
from cluster.capacity.demand import Demand, Hardware, hit_rate
from cluster.capacity.engine import Device, Machine
from cluster.capacity.model import Closed, Cluster, Method, Open, Stages, Workload
from cluster.capacity.planner import Question, study
from cluster.capacity.simulation import simulate
from cluster.capacity.size import ImpossibleError, Sizer
from cluster.capacity.targets import PUBLISHED, UnknownTargetError, find_target
from kvcache.settings import Settings

TARGET = PUBLISHED["qwen2.5-3b"]
STEP_S = 0.01
ONLY_STEPS = Stages(step_s=STEP_S, macs_per_s=1e30, load_s_per_token=0.0, repair_macs_per_s=1e30, outside_s=0.0)
ONE_AT_A_TIME = Cluster(max_num_seqs=1)


def geometric(mean: float) -> Workload:
    return Workload(mean_tokens=100, output_tokens=mean)


def fixed(outputs: int, tokens: int = 100) -> Workload:
    return Workload(mean_tokens=tokens, output_tokens=outputs, fixed_outputs=True)


def wait_of_an_m_g_1_queue(rate: float, mean: float, second_moment: float) -> float:
    """Pollaczek and Khinchine."""
    return rate * second_moment / 2 / (1 - rate * mean)


@pytest.mark.parametrize("used", [0.3, 0.7])
def test_an_engine_without_batching_is_an_m_d_1_queue(used: float) -> None:
    rate = used / STEP_S
    seen = simulate("full", Open(rate), TARGET, fixed(1), ONLY_STEPS, ONE_AT_A_TIME, requests=20_000)
    expected = STEP_S + wait_of_an_m_g_1_queue(rate, STEP_S, STEP_S**2)
    assert seen.e2e_s.mean() == pytest.approx(expected, rel=0.04)
    assert seen.busy["engine"] == pytest.approx(used, rel=0.02)


def test_an_engine_without_batching_is_an_m_g_1_queue() -> None:
    mean, used = 4.0, 0.6
    chance = 1 / (mean - 1)  # answers are one token plus a geometric number of them
    second_moment = ((1 - chance) / chance**2 + mean**2) * STEP_S**2
    rate = used / (mean * STEP_S)
    seen = simulate("full", Open(rate), TARGET, geometric(mean), ONLY_STEPS, ONE_AT_A_TIME, requests=20_000)
    expected = mean * STEP_S + wait_of_an_m_g_1_queue(rate, mean * STEP_S, second_moment)
    assert seen.e2e_s.mean() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("clients", [1, 4])
def test_each_request_in_a_batch_has_its_own_kv_read(clients: int) -> None:
    read, outputs = STEP_S / 1000, 200
    stages = replace(ONLY_STEPS, read_s_per_token=read)
    work = fixed(outputs)
    seen = simulate("stale", Closed(clients), TARGET, work, stages, Cluster(), requests=10 * clients)
    context = work.mean_tokens + work.header_tokens + work.question_tokens
    assert seen.throughput_rps == pytest.approx(clients / outputs / (STEP_S + clients * context * read), rel=0.02)


@pytest.mark.parametrize("clients", [2, 5])
def test_a_closed_loop_is_the_machine_repairman(clients: int) -> None:
    """Long geometric answers make service nearly exponential; time outside counts by its mean only."""
    mean, outside = 20.0, 0.4
    service = mean * STEP_S
    stages = replace(ONLY_STEPS, outside_s=outside)
    seen = simulate("full", Closed(clients), TARGET, geometric(mean), stages, ONE_AT_A_TIME, requests=4_000)
    weights = [factorial(clients) / factorial(clients - n) * (service / outside) ** n for n in range(clients + 1)]
    expected = (1 - weights[0] / sum(weights)) / service
    assert seen.throughput_rps == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_little_s_law_holds(clients: int) -> None:
    seen = simulate("repaired", Closed(clients), TARGET, published.WORKLOAD, published.PRIOR, published.CLUSTER)
    assert seen.throughput_rps * seen.e2e_s.mean() == pytest.approx(clients, rel=0.05)


def test_devices_of_one_machine_share_its_speed() -> None:
    """One second of work alone, and another that begins half a second later: 1.5 and 2 seconds."""
    env = simpy.Environment()
    machine, ends = Machine(env), []

    def work(begin: float) -> Generator[simpy.Event, None, None]:
        yield env.timeout(begin)
        yield from Device(env, machine=machine).use(1.0)
        ends.append(env.now)

    for begin in (0.0, 0.5, 3.0):
        env.process(work(begin))
    env.run()
    assert ends == pytest.approx([1.5, 2.0, 4.0])


@pytest.mark.parametrize("method", ["full", "repaired"])
def test_one_client_has_a_shared_machine_to_itself(method: Method) -> None:
    in_turn, at_once = (
        simulate(method, Closed(1), TARGET, fixed(4), published.PRIOR, Cluster(time_shared=shared), requests=5)
        for shared in (False, True)
    )
    assert at_once.ttft_s == pytest.approx(in_turn.ttft_s)
    assert at_once.e2e_s == pytest.approx(in_turn.e2e_s)


@pytest.mark.parametrize(("overlap", "together_s"), [(0.8, 2.5), (1.0, 2.0), (1.5, 4 / 3), (3.0, 1.0)])
def test_a_machine_does_as_much_at_once_as_its_overlap_says(overlap: float, together_s: float) -> None:
    for devices, expected in ((1, 1.0), (2, together_s)):
        env = simpy.Environment()
        machine = Machine(env, overlap)
        for _ in range(devices):
            env.process(Device(env, machine=machine).use(1.0))
        env.run()
        assert env.now == pytest.approx(expected)


@pytest.mark.parametrize(
    ("overlap", "weights", "expected"),
    [
        (1.0, (3.0, 1.0), [4 / 3, 2.0]),  # three to one; the other then has 2/3 of its second left to do alone
        (
            1.5,
            (1.0, 2.4),
            [1.0, 1.5],
        ),  # the heavier takes its own speed, not 1.06 times that; the rest goes to the other
    ],
)
def test_a_machine_is_shared_by_weight(overlap: float, weights: tuple[float, ...], expected: list[float]) -> None:
    env = simpy.Environment()
    machine, ends = Machine(env, overlap), []

    def work(weight: float) -> Generator[simpy.Event, None, None]:
        yield from Device(env, machine=machine, weight=weight).use(1.0)
        ends.append(env.now)

    for weight in weights:
        env.process(work(weight))
    env.run()
    assert ends == pytest.approx(expected)


def test_nothing_is_between_tokens_where_there_is_one() -> None:
    assert not simulate("full", Closed(1), TARGET, fixed(1), ONLY_STEPS, Cluster(), requests=2, lead_in=2).itl_s.size


def test_reused_kv_is_put_together_before_the_engine_sees_it() -> None:
    stages = replace(ONLY_STEPS, assemble_s_per_token=1e-4)
    for method, seconds in (("full", 0.0), ("stale", (1000 + 24) * 1e-4)):
        seen = simulate(method, Closed(1), TARGET, fixed(3, 1000), stages, Cluster(time_shared=True), requests=4)
        assert seen.ttft_s == pytest.approx(STEP_S + seconds)
        assert seen.parts_s["repairers"] == pytest.approx(seconds)
        assert seen.itl_s == pytest.approx([STEP_S] * 4 * 2)


def test_requests_in_one_batch_share_its_steps() -> None:
    for clients in (1, 8):
        seen = simulate("stale", Closed(clients), TARGET, fixed(10), ONLY_STEPS, Cluster(max_num_seqs=8))
        assert seen.throughput_rps == pytest.approx(clients / (10 * STEP_S), rel=0.01)


def test_a_prompt_longer_than_the_budget_takes_several_steps() -> None:
    tokens, cluster = 10_000, Cluster(batch_tokens=4096)
    work = replace(fixed(1, tokens), header_tokens=0, question_tokens=10)
    seen = simulate("full", Closed(1), TARGET, work, ONLY_STEPS, cluster, requests=1)
    assert seen.ttft_s[0] == pytest.approx(3 * STEP_S)


@pytest.mark.parametrize(("link", "name"), [("storage_bytes_per_s", "storage link"), ("hop_bytes_per_s", "KV hop")])
def test_the_slowest_link_bounds_throughput(link: str, name: str) -> None:
    work = fixed(1, 1000)
    carried = TARGET.kv_bytes(1000 + work.header_tokens)
    cluster = replace(
        Cluster(engines=4, repairers=2, host_hit_rate=0.0, first_byte_s=0.001, storage_bytes_per_s=1e15),
        **{link: 1e9},
    )
    stages = replace(ONLY_STEPS, step_s=1e-4)
    seen = simulate("stale", Closed(40), TARGET, work, stages, cluster, requests=1000)
    assert seen.throughput_rps == pytest.approx(2 * 1e9 / carried, rel=0.05)
    assert max(seen.busy, key=lambda kind: seen.busy[kind]) == name


def test_what_is_in_host_memory_is_not_fetched() -> None:
    cluster = Cluster(repairers=1, first_byte_s=0.1)
    work = fixed(1)
    held, fetched = (
        simulate("stale", Closed(1), TARGET, work, ONLY_STEPS, replace(cluster, host_hit_rate=rate), requests=20)
        for rate in (1.0, 0.0)
    )
    transfer = TARGET.kv_bytes(100 + work.header_tokens) / cluster.storage_bytes_per_s
    assert fetched.ttft_s.mean() - held.ttft_s.mean() == pytest.approx(0.1 + transfer)


def test_a_device_of_their_own_relieves_the_engine_of_repairs() -> None:
    slow = replace(published.PRIOR, repair_macs_per_s=1e12)
    shared, apart = (
        simulate("repaired", Closed(8), TARGET, published.WORKLOAD, slow, Cluster(repairers=count)).throughput_rps
        for count in (0, 8)
    )
    assert apart > 2 * shared


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> np.ndarray:
        load = Open(10.0)
        return simulate("stale", load, TARGET, published.WORKLOAD, published.PRIOR, Cluster(), seed=seed).ttft_s

    assert np.array_equal(run(3), run(3))
    assert not np.array_equal(run(3), run(4))


def test_published_targets_have_the_published_costs() -> None:
    """Methods, section 0.6: 85.5 TMAC for 16,384 tokens in full, and KV bytes per token."""
    assert TARGET.cost.full(16_384, 60) == pytest.approx(85.5e12, rel=0.005)
    assert [target.kv_bytes(1) for target in PUBLISHED.values()] == [36_864, 131_072, 196_608]


def test_the_lead_in_counts_neither_in_times_nor_in_throughput() -> None:
    clients, counted = 4, 20
    seen = simulate(
        "full",
        Closed(clients),
        TARGET,
        fixed(1),
        ONLY_STEPS,
        ONE_AT_A_TIME,
        requests=clients + counted,
        lead_in=clients,
    )
    assert seen.ttft_s == pytest.approx(np.full(counted, clients * STEP_S))
    assert seen.throughput_rps == pytest.approx(1 / STEP_S)


def test_requests_have_the_lengths_that_were_measured() -> None:
    work, random = Workload(1, header_tokens=24, documents=(300, 100), answers=(9, 3, 5)), np.random.default_rng(0)
    assert sorted(work.prefixes(random, 4)) == [124, 124, 324, 324]
    assert sorted(work.outputs(random, 3)) == [3, 5, 9]


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.3])
def test_hit_rate_is_the_share_of_the_most_popular(skew: float) -> None:
    weights = np.arange(1, 200_001, dtype=float) ** -skew
    assert hit_rate(5_000, 200_000, skew) == pytest.approx(weights[:5_000].sum() / weights.sum(), rel=1e-3)
    assert hit_rate(300_000, 200_000, skew) == 1.0


def sizer(**hardware: float) -> Sizer:
    work = replace(published.WORKLOAD, top_k=6)
    return Sizer(TARGET, work, published.PRIOR, Hardware(**hardware))


def test_ten_times_the_rate_takes_about_ten_times_the_machines() -> None:
    sized = sizer()
    small, large = (sized.size("repaired", Demand(rate, 10**6, 0.5)) for rate in (1_000, 10_000))
    for kind in ("engines", "repairers", "retrievers"):
        assert 0 <= 10 * getattr(small, kind) - getattr(large, kind) < 10  # what is counted is rounded up
    assert large.p95_ttft_s <= 0.5
    assert max(large.used.values()) <= 0.75


def test_a_plan_adds_up_at_internet_scale() -> None:
    plan = sizer().size("repaired", Demand(10_000, 10**9, 0.5))
    assert plan.storage_bytes == 10**9 * 512 * 36_864
    prefix = TARGET.kv_bytes(2_800 + 24)
    assert plan.hop_bytes_per_s == 10_000 * prefix
    assert plan.storage_bytes_per_s == pytest.approx(10_000 * prefix * (1 - plan.host_hit_rate))
    assert plan.devices == plan.engines + plan.repairers
    assert plan.dollars_per_hour["devices"] == 2.5 * plan.devices
    assert plan.used[plan.bottleneck] == max(plan.used.values())


@pytest.mark.parametrize(
    ("slow", "name"), [({"hop_bytes_per_s": 2e8}, "KV hop"), ({"storage_bytes_per_s": 1e8}, "storage link")]
)
def test_the_link_that_sets_the_number_of_repair_nodes_is_named(slow: dict[str, float], name: str) -> None:
    demand = Demand(20, 10**8, 5.0)
    plan = sizer(**slow).size("repaired", demand)
    assert plan.repairers_set_by == name
    assert plan.repairers > sizer().size("repaired", demand).repairers


def test_a_bound_below_the_idle_time_is_refused() -> None:
    with pytest.raises(ImpossibleError, match=r"full: p95 TTFT is 1.. ms on an idle cluster"):
        sizer().size("full", Demand(1, 1000, 0.05))


def test_break_even_is_that_of_table_22() -> None:
    """Published for the 3B target: 5.1 to 5.8 million requests. The saving is the model's, from the load test."""
    found = study(Question(Demand(10, 1000, 0.5), Hardware()), Settings())
    assert found.break_even is not None
    least, most = found.break_even["requests"]
    assert least <= 5.1e6 <= 5.8e6 <= most
    assert most < 6.5e6 and least > 4.5e6
    assert break_even_requests(1.0, 0.036) == pytest.approx(100_000)
    with pytest.raises(NothingSavedError, match="never pays"):
        break_even_requests(1.0, 0.0)


def test_an_unknown_target_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownTargetError, match=r"nonsense.*qwen2.5-3b"):
        find_target("nonsense", Settings(models_dir=str(tmp_path)))


def test_the_command_answers_as_json_and_as_a_figure(tmp_path: Path) -> None:
    chart = tmp_path / "plan.png"
    done = CliRunner().invoke(
        app, ["plan", "--rps", "50", "--chunks", "1e5", "--json", "--chart", str(chart)], catch_exceptions=False
    )
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert [plan["method"] for plan in answer["plans"]] == ["full", "stale", "repaired"]
    assert answer["fit"]["worst_error"] < 0.1
    assert chart.read_bytes().startswith(b"\x89PNG")
