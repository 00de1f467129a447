# SPDX-License-Identifier: Apache-2.0
"""What a method came to over a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.qa.results import Row


@dataclass(frozen=True)
class MethodSummary:
    """What a method came to, over its questions.

    Attributes:
        n: questions.
        f1, em: means, 0 to 1.
        gold_logprob: mean over questions of the gold answer's log-probability per token, in nats.
        ttft_p50_s, ttft_p90_s: time to first token, from asking the mender to the engine's first token.
        prompt_tokens, cached_tokens: means.
        fallbacks: questions whose whole prompt was computed against the method's intention.
    """

    n: int
    f1: float
    em: float
    gold_logprob: float
    ttft_p50_s: float
    ttft_p90_s: float
    prompt_tokens: float
    cached_tokens: float
    fallbacks: int


def summarise(rows: Sequence[Row]) -> MethodSummary:
    """Means and percentiles (linear between neighbours) of one method's rows."""

    def mean(name: str) -> float:
        return float(np.mean([row[name] for row in rows]))

    p50, p90 = np.percentile([row["ttft_s"] for row in rows], [50, 90])
    return MethodSummary(
        n=len(rows),
        f1=mean("f1"),
        em=mean("em"),
        gold_logprob=mean("gold_logprob_mean"),
        ttft_p50_s=float(p50),
        ttft_p90_s=float(p90),
        prompt_tokens=mean("prompt_tokens"),
        cached_tokens=mean("cached_tokens"),
        fallbacks=sum(row["fallback"] is not None for row in rows),
    )
