# SPDX-License-Identifier: Apache-2.0
"""How many repairers and engines there should be: a queueing calculation, and Ray Serve's two ways to ask for it.

Replicas tell what they measured (`serve_app.meter`): how long a request holds one of their slots, and how many arrived.
Little's law makes a rate of that and of the requests in flight; Erlang's C formula makes replicas of the rate, as many
as keep the waits inside what the objective for the time to first token leaves. A rate is never taken from a queue's
length alone, so that a burst's backlog does not become replicas that nobody needs a moment later.

Ray ships policies to its controller by value, which need not have this project: this module imports nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.config import AutoscalingContext

METRICS_S = 1.0
"""Seconds between two reports to the autoscaler."""
LOOK_BACK_S = 5.0
"""Seconds over which requests in flight are averaged."""
WINDOW_S = 10.0
"""Seconds over which rates are."""
UPSCALE_DELAY_S = 2.0
"""Seconds for which more must have been needed."""
DEVIATIONS = 2.0
"""Fewer replicas must be enough for a rate that many standard deviations of its count above the one measured."""
MISSES = 0.05
"""Share of requests that may be past the objective: it is for the p95."""
STEADY = 0.2
"""Arrivals and departures that differ by less than this share of them leave a queue that stands still."""
LEAST_WAIT = 0.1
"""Share of the objective left for waiting where the work alone takes it all: more replicas do not make work faster."""
MEAN_OF_P95 = 1 / 3
"""Mean of an exponential wait through its p95: 1 / ln 20."""


@dataclass(frozen=True)
class Stage:
    """What is known of one deployment.

    Attributes:
        replicas: wanted now.
        slots: requests that one replica serves at once.
        in_flight: requests served or waiting, a recent mean.
        arrivals, departures: requests per second that came and that left, recent means.
        service_s: mean seconds that a request holds a slot; None before the first has ended.
        spread: squared coefficient of variation of those seconds: 0 when all are alike, 1 when exponential.
        first_s: p95 of its share of the time to first token, waits apart, in seconds.
        settled: whether the rates are all of the replicas that there are now.
    """

    replicas: int
    slots: float
    in_flight: float
    arrivals: float
    departures: float
    service_s: float | None
    spread: float
    first_s: float
    settled: bool = True


def decide(stages: Mapping[str, Stage], slo_s: float) -> dict[str, int]:
    """Replicas of each deployment for the load on all of them.

    A deployment behind a slow one sees only what that one lets through; what counts is the application's rate of
    arrivals. Where requests leave as fast as they come, and yet are many, their number counts too: clients that wait
    for answers send no more than there are answers, and a full service turns the others away. Then the rate is what it
    takes to turn over all in flight in the time that the objective allows (Little: N = X * R). A queue that grows or
    shrinks, or that new replicas are about to shrink, says nothing of that kind: the arrivals are known, and replicas
    for its length would be too many once it is gone.

    Args:
        stages: by name, in any order; a request passes through each once.
        slo_s: objective for the p95 of the time to first token, in seconds.

    Returns:
        Replicas; 0 where nothing comes and nothing is in flight, those of now where no service has been measured. Ray
        keeps them within the deployment's bounds.
    """
    if not any(stage.arrivals or stage.in_flight for stage in stages.values()):
        return dict.fromkeys(stages, 0)
    served = {name: stage.service_s for name, stage in stages.items() if stage.service_s is not None}
    if not served:
        return {name: stage.replicas for name, stage in stages.items()}
    wait_s = max(slo_s - sum(stage.first_s for stage in stages.values()), LEAST_WAIT * slo_s)
    rate = max(stage.arrivals for stage in stages.values())
    left = min(stage.departures for stage in stages.values())
    settled = all(stage.settled for stage in stages.values())
    if settled and abs(rate - left) <= STEADY * max(rate, left):
        in_flight = sum(stages[name].in_flight for name in served)
        rate = max(rate, in_flight / (sum(served.values()) + wait_s * MEAN_OF_P95))

    def enough(name: str, for_rate: float) -> int:
        # Each of the waits is too long for its share of the misses only: their sum then misses no more than allowed.
        stage, part = stages[name], len(stages)
        return replicas_for(for_rate, served[name], stage.spread, stage.slots, wait_s / part, MISSES / part)

    surely = rate + DEVIATIONS * math.sqrt(rate / WINDOW_S)
    return {
        name: max(enough(name, rate), min(stage.replicas, max(enough(name, surely), busy_floor(stage))))
        if name in served
        else stage.replicas
        for name, stage in stages.items()
    }


def busy_floor(stage: Stage) -> int:
    """Replicas that the requests in flight fill, of those there are: fewer would have to drop streams."""
    return min(stage.replicas, math.ceil(stage.in_flight / stage.slots))


def replicas_for(rate: float, service_s: float, spread: float, slots: float, wait_s: float, misses: float) -> int:
    """Fewest replicas at which at most `misses` of the requests wait longer than `wait_s`.

    Args:
        rate: arrivals per second.
        service_s, spread: mean and squared coefficient of variation of the seconds of service.
        slots: requests that a replica serves at once.
        wait_s: longest wait, in seconds.
        misses: share of the requests that may wait longer.
    """
    replicas = max(1, math.floor(rate * service_s / slots))
    while waits_longer(rate, service_s, spread, math.floor(replicas * slots), wait_s) > misses:
        replicas += 1
    return replicas


def waits_longer(rate: float, service_s: float, spread: float, slots: int, wait_s: float) -> float:
    """Share of requests that wait longer than `wait_s` in an M/G/c queue; 1 when it grows without bound.

    Erlang's C (from his B, whose recursion is exact for any number of slots) says how many wait at all; how long is
    exponential, with the mean of Allen and Cunneen: the M/M/c queue's times (1 + spread) / 2. Exact for M/M/c.
    """
    offered = rate * service_s
    if offered <= 0:
        return 0.0
    if offered >= slots:
        return 1.0
    blocked = 1.0
    for slot in range(1, slots + 1):
        blocked = offered * blocked / (slot + offered * blocked)
    must_wait = blocked / (1 - offered / slots * (1 - blocked))
    return must_wait * math.exp(-(slots - offered) * wait_s / service_s * 2 / (1 + spread))


def scale_together(contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """Ray Serve's application-level policy: name it under `autoscaling_policy` in the application's Serve config."""
    return _scale(contexts, 1.0), {}


def scale_alone(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Ray Serve's policy of one deployment, for applications that no Serve config deployed.

    It knows nothing of the other one: half the objective is its own, and an engine sees a higher load only when the
    repairers have grown to let it through.
    """
    return _scale({context.deployment_id: context}, 0.5)[context.deployment_id], {}


def _scale(contexts: Mapping[Any, AutoscalingContext], share: float) -> dict[Any, int]:
    reports = {name: _reports(context) for name, context in contexts.items()}
    if not all(reports.values()):
        # Whoever sleeps wakes with the first of them that has work, not one after the other as the work gets there.
        awake = int(any(context.total_num_requests for context in contexts.values()))
        return {name: max(context.target_num_replicas, awake) for name, context in contexts.items()}
    stages = {name: stage_of(context, reports[name]) for name, context in contexts.items()}
    slo_s = max((report["slo_s"] for told in reports.values() for report in told), default=0.0)
    return decide(stages, slo_s * share) if stages else {}


def _reports(context: AutoscalingContext) -> list[dict[str, float]]:
    """What each replica said last (see `serve_app.meter.ServiceMeter.stats`)."""
    by_replica: dict[Any, dict[str, float]] = {}
    for metric, replicas in (context.raw_metrics or {}).items():
        for replica, series in replicas.items():
            if series:
                by_replica.setdefault(replica, {})[metric] = series[-1].value
    return [report for report in by_replica.values() if "slo_s" in report]


def stage_of(context: AutoscalingContext, reports: Sequence[Mapping[str, float]]) -> Stage:
    """What Ray's controller knows of a deployment.

    Args:
        context: of the deployment.
        reports: of its replicas, at least one. Those that have served nothing yet only count for arrivals.
    """
    known = [report for report in reports if report["service_s"] >= 0]

    def mean(metric: str) -> float:
        return sum(report[metric] for report in known or reports) / len(known or reports)

    return Stage(
        replicas=context.target_num_replicas,
        slots=mean("slots"),
        in_flight=context.total_num_requests,
        arrivals=sum(report["arrivals"] for report in reports),
        departures=sum(report["departures"] for report in reports),
        service_s=mean("service_s") if known else None,
        spread=mean("spread"),
        first_s=mean("first_s"),
        settled=min(report["age_s"] for report in reports) >= WINDOW_S,
    )
