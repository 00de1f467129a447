# SPDX-License-Identifier: Apache-2.0
"""From a question to an answer: fit, check the fit, size each method, say when a repair network pays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.capacity import published
from cluster.capacity.breakeven import break_even_requests
from cluster.capacity.demand import Demand, Hardware
from cluster.capacity.fit import Installation, Prediction, fit, guess_stages, predict
from cluster.capacity.loadtest import LoadTest, read_load_test
from cluster.capacity.model import METHODS, Closed, Cluster, Method, Stages, Workload
from cluster.capacity.simulation import simulate
from cluster.capacity.size import ImpossibleError, Plan, Sizer
from cluster.capacity.targets import Target, find_target
from kvcache.settings import Settings

_CURVE = (0.001, 0.01, 0.1, 1.0)
"""Rates of the figure's curve, as shares of the one asked for."""


@dataclass(frozen=True)
class Question:
    """What `cachemend plan` is asked. None leaves a value to the load test that is fitted on.

    Attributes:
        demand: what has to be served.
        hardware: links, memory, prices.
        load_test: JSON to fit on; None takes CacheRepair's published one.
        fitted_at: concurrency to fit on.
        target: to plan for.
        prompt_tokens: mean document tokens of a prompt.
        output_tokens: mean tokens of an answer.
    """

    demand: Demand
    hardware: Hardware
    load_test: Path | None = None
    fitted_at: int | None = None
    target: str | None = None
    prompt_tokens: int | None = None
    output_tokens: float | None = None


@dataclass
class Study:
    """The answer.

    Attributes:
        source: what was fitted on.
        fitted_at: concurrency of the cells the fit saw.
        target: name of the target planned for.
        workload: the requests planned for.
        stages: service times planned with.
        predictions: the load test's numbers beside the model's.
        plans: a plan per method that can keep the bound.
        impossible: why the others cannot, by method.
        break_even: of the repair network; None where repair saves nothing.
    """

    source: str
    fitted_at: int
    target: str
    workload: Workload
    stages: Stages
    predictions: list[Prediction]
    plans: list[Plan]
    impossible: dict[Method, str]
    break_even: dict[str, Any] | None
    sizer: Sizer = field(repr=False)
    demand: Demand = field(repr=False)

    @property
    def worst_error(self) -> float:
        """Largest relative error among the numbers the fit did not see."""
        return max((abs(one.error) for one in self.predictions if not one.fitted), default=0.0)

    def curve(self) -> dict[float, list[Plan]]:
        """Plans for parts of the rate and for all of it, by rate."""
        rates = [share * self.demand.rate for share in _CURVE]
        return {rate: _plans(self.sizer, replace(self.demand, rate=rate))[0] for rate in rates}


def study(question: Question, settings: Settings) -> Study:
    """Fit, check, size.

    Raises:
        LoadTestError: the load test cannot be fitted on.
        UnknownTargetError: the target's sizes are not known.
    """
    if question.load_test is None:
        source, test = "CacheRepair's load test (Qwen2.5-3B, one A800)", published.TABLE_21
        measured = Installation(published.TARGET, published.WORKLOAD, published.CLUSTER)
        prior, fitted_at = published.PRIOR, question.fitted_at or published.FITTED_AT
    else:
        source, test = str(question.load_test), read_load_test(question.load_test)
        measured = _measured_here(question, test, settings)
        prior, fitted_at = guess_stages(test, measured), question.fitted_at or _middle(test)
    stages = fit(test, fitted_at, measured, prior)
    target = measured.target
    if question.target and question.load_test is None:
        on_gpu = settings.target.model_copy(update={"device": "cuda"})  # as the published machine
        target = find_target(question.target, settings.model_copy(update={"target": on_gpu}))
    workload = _asked_workload(question, measured.workload)
    planned = _carried_over(stages, measured.target, target)
    sizer = Sizer(target, workload, planned, question.hardware)
    plans, impossible = _plans(sizer, question.demand)
    return Study(
        source=source,
        fitted_at=fitted_at,
        target=target.name,
        workload=workload,
        stages=planned,
        predictions=predict(test, measured, stages, fitted_at),
        plans=plans,
        impossible=impossible,
        break_even=_break_even(target, workload, planned),
        sizer=sizer,
        demand=question.demand,
    )


def saving_s(target: Target, workload: Workload, stages: Stages) -> float:
    """Seconds to the first token that repair saves a request on an idle machine, on average."""

    def mean(method: Method) -> float:
        return float(simulate(method, Closed(1), target, workload, stages, Cluster()).ttft_s.mean())

    return mean("full") - mean("repaired")


def _break_even(target: Target, workload: Workload, stages: Stages) -> dict[str, Any] | None:
    saved = saving_s(target, workload, stages)
    if saved <= 0:
        return None
    hours = [training + published.STATISTICS_GPU_HOURS for training in published.TRAINING_GPU_HOURS]
    return {
        "device_hours": hours,
        "saving_ms": saved * 1e3,
        "requests": [break_even_requests(each, saved) for each in hours],
    }


def _plans(sizer: Sizer, demand: Demand) -> tuple[list[Plan], dict[Method, str]]:
    plans: list[Plan] = []
    impossible: dict[Method, str] = {}
    for method in METHODS:
        try:
            plans.append(sizer.size(method, demand))
        except ImpossibleError as error:
            impossible[method] = str(error)
    return plans, impossible


def _measured_here(question: Question, test: LoadTest, settings: Settings) -> Installation:
    """The installation that a load test of ours was made on: engine and repair share its cores.

    Lengths are the load test's, then the question's, then what the settings make likely.
    """
    seen, work = test.mean("prompt_tokens"), Workload(1)
    around = work.header_tokens + work.question_tokens
    documents = max(seen - around, 1) if seen else question.prompt_tokens
    target = find_target(question.target or settings.target.model, settings)
    return Installation(
        replace(target, padded=False),
        Workload(
            mean_tokens=documents or settings.retrieval.top_k * settings.chunking.max_tokens,
            output_tokens=test.mean("completion_tokens") or question.output_tokens or settings.api.default_max_tokens,
            top_k=settings.retrieval.top_k,
            fixed_outputs=True,
            documents=tuple(max(tokens - around, 1) for tokens in test.samples("prompt")),
            answers=test.samples("completion"),
        ),
        Cluster(
            time_shared=True,
            max_num_seqs=settings.engine.max_num_seqs,
            batch_tokens=settings.engine.max_num_batched_tokens,
        ),
    )


def _asked_workload(question: Question, measured: Workload) -> Workload:
    tokens = question.prompt_tokens or measured.mean_tokens
    stretch = tokens / measured.mean_tokens
    return replace(
        measured,
        mean_tokens=tokens,
        sd_tokens=measured.sd_tokens * stretch,
        min_tokens=round(measured.min_tokens * stretch) or 1,
        max_tokens=round(measured.max_tokens * stretch),
        output_tokens=question.output_tokens or measured.output_tokens,
        max_output_tokens=max(measured.max_output_tokens, round(4 * (question.output_tokens or 0))),
        top_k=max(round(tokens / question.demand.chunk_tokens), 1),
        documents=tuple(max(round(one * stretch), 1) for one in measured.documents),
        answers=() if question.output_tokens else measured.answers,
    )


def _carried_over(stages: Stages, measured: Target, target: Target) -> Stages:
    """The same machine with another target: rates stay, loading follows the KV's bytes, a step the layers."""
    return replace(
        stages,
        load_s_per_token=stages.load_s_per_token * target.kv_bytes(1) / measured.kv_bytes(1),
        read_s_per_token=stages.read_s_per_token * target.kv_bytes(1) / measured.kv_bytes(1),
        assemble_s_per_token=stages.assemble_s_per_token * target.kv_bytes(1) / measured.kv_bytes(1),
        step_s=stages.step_s * target.geometry.n_layers / measured.geometry.n_layers,
    )


def _middle(test: LoadTest) -> int:
    there = test.concurrencies
    return there[len(there) // 2]  # the more loaded of two: an idle machine says little about a loaded one
