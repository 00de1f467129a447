# SPDX-License-Identifier: Apache-2.0
"""Where the job's actors run, and about how long they take."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import ray
import torch

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from pipelines.placement import target_actors
from pipelines.qa.answerer import AnswerOptions
from repair.registry import REPAIRERS, create
from repair.spec import MethodSpec

_ENGINE_START_S = 60.0
_TIMED_TOKENS = 256


def answer_actors(settings: Settings) -> tuple[dict[str, float], int]:
    """Resources of an actor, which holds the target and an engine, and how many there is room for."""
    resources, actors = target_actors(settings)
    wide = settings.engine.tensor_parallel_size
    if "num_gpus" in resources and wide > 1:
        return {**resources, "num_gpus": wide}, max(1, min(actors, int(ray.cluster_resources()["GPU"]) // wide))
    return resources, actors


def estimate(missing: Sequence[tuple[str, int]], options: AnswerOptions, settings: Settings) -> float:
    """Seconds: engine start; prompts computed twice for methods without reuse (to answer, and to score the gold
    answer), and once, chunk by chunk, for all others together; new tokens."""
    resources, actors = answer_actors(settings)
    timed = ray.remote(max_calls=1, **resources)(_time_passes)  # the process, and its target, go with it
    loading, prefill, decode = ray.get(
        timed.remote(settings, list(options.methods.values()), int(resources["num_cpus"]))
    )
    reusing = {label for label, spec in options.methods.items() if REPAIRERS[spec.name].needs_stale}
    whole = sum(tokens for label, tokens in missing if label not in reusing)
    alone = sum(tokens for label, tokens in missing if label in reusing) / max(1, len(reusing))
    work = prefill * (2 * whole + alone) + decode * options.max_tokens * len(missing)
    return loading + _ENGINE_START_S + work / actors


def _time_passes(settings: Settings, methods: Collection[MethodSpec], threads: int) -> tuple[float, float, float]:
    """Seconds to load, per prefilled token, and per new token; refuses methods that cannot be used."""
    begin = time.perf_counter()
    torch.set_num_threads(threads)
    target = TargetLLM.load(settings=settings)
    for spec in methods:
        create(spec.name, target, settings).check_params(spec.params)
    ids = list(range(min(_TIMED_TOKENS, target.geometry.vocab_size, target.geometry.max_positions)))
    target.stale_kv([ids[:8]])
    times = [time.perf_counter()]
    for part in (ids, ids[:1]):
        target.stale_kv([part])
        times.append(time.perf_counter())
    return times[0] - begin, (times[1] - times[0]) / len(ids), times[2] - times[1]
