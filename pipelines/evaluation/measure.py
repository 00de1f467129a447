# SPDX-License-Identifier: Apache-2.0
"""One request, one method: everything that is measured of it, as a row of the work file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcache.chunk import ChunkKV
from kvcache.compile import from_hf_cache
from kvcache.target import TargetLLM
from pipelines.evaluation.kv_error import Sums, normalised_mse, relative_rms, square_sums
from pipelines.evaluation.passes import (
    Prompted,
    attention_outputs,
    end_ids,
    greedy,
    question_states,
    read_prompt,
)
from pipelines.evaluation.requests import ANSWER_TOKENS, EvaluationRequest
from pipelines.qa.continuation import answer_likelihoods, forced_logprobs
from pipelines.qa.metrics import exact_match, extract_answer, f1
from pipelines.training.statistics import Statistics
from repair.base import Repairer, RepairRequest, joined
from repair.full import FullPrefill
from repair.macs import CostModel


@dataclass(frozen=True)
class Reference:
    """What full prefill makes of a request: every method is compared with it.

    Attributes:
        prompt: its prompt, read.
        joint: canonical joint KV, float32 `[T, L, H, 2, D]`.
        joint_sums: its squares.
        forced: ids of its greedy answer, the end-of-turn token included where it came.
        logprobs: before each of these, float64 `[n, V]`.
        states: see `passes.question_states`.
        attention: see `passes.attention_outputs`.
    """

    prompt: Prompted
    joint: torch.Tensor
    joint_sums: Sums
    forced: list[int]
    logprobs: torch.Tensor
    states: list[torch.Tensor]
    attention: list[torch.Tensor]


class Meter:
    """Measures methods against full prefill.

    Args:
        target: the target LLM.
        statistics: units of the normalised error.
    """

    def __init__(self, target: TargetLLM, statistics: Statistics) -> None:
        self._target = target
        self._statistics = statistics
        self._costs = CostModel.of(target.model.config)

    def reference(self, request: EvaluationRequest, full: Repairer) -> Reference:
        """Full prefill of a request; `full` is the registry's."""
        prompt = read_prompt(self._target, full, RepairRequest(request.chunks, (), request.question_ids))
        joint = from_hf_cache(prompt.cache, self._target.rotary, request.prefix_tokens)[0]
        forced = greedy(self._target, prompt, ANSWER_TOKENS)
        states = question_states(self._target, prompt, request.question_ids)
        return Reference(
            prompt=prompt,
            joint=joint,
            joint_sums=square_sums(joint, request.lengths),
            forced=forced,
            logprobs=forced_logprobs(self._target, prompt.cache, prompt.logits_V, forced),
            states=states,
            attention=attention_outputs(self._target, prompt, states),
        )

    def measure(
        self,
        request: EvaluationRequest,
        reference: Reference,
        repairer: Repairer,
        params: Mapping[str, Any],
        stale: Sequence[ChunkKV],
    ) -> dict[str, Any]:
        """One method on one request.

        Args:
            request: the request.
            reference: of the same request.
            repairer: the method; full prefill itself is taken from the reference.
            params: its parameters, checked.
            stale: stale KV of the request's chunks, in host memory.

        Returns:
            `{"metrics": {name: number or None}, "answer": text, "attention": [L], "shares": {name: share of the rows},
            "kv_error": sums or None}`, and for full prefill also `"kv_joint"`: sums of squares, see `kv_error.Sums`.
            Metrics:

            f1, em: of the greedy answer, by CacheRepair's definitions; 0 to 1.
            gold_logprob, gold_logprob_sum: natural log-likelihood of the best gold answer, per token and in all.
            kl_to_full: KL(full || method) of the next token, nats, mean over full's greedy answer.
            kv_mse_normalized, k_rmse, v_rmse: of canonical KV against joint KV; None when the method's rows are others.
            attention_error: relative RMS error of the question's attention outputs, mean over layers.
            token_agreement: share of positions at which the greedy answer has full's token; the longer one counts.
            answer_equal: whether the extracted answer is full's, after normalisation.
            ttft_ms, repair_ms: see `passes.Prompted`; macs: of the same work; kv_bytes: of the rows handed over.
        """
        own = isinstance(repairer, FullPrefill)
        prompt = (
            reference.prompt
            if own
            else read_prompt(
                self._target, repairer, RepairRequest(request.chunks, stale, request.question_ids, dict(params))
            )
        )
        answer = greedy(self._target, prompt, ANSWER_TOKENS)
        text, full_text = self._text(answer), self._text(reference.forced)
        gold_mean, gold_sum = max(answer_likelihoods(self._target, prompt.cache, prompt.logits_V, request.answer_ids))
        attention = [
            _relative(ours - theirs, theirs)
            for ours, theirs in zip(
                attention_outputs(self._target, prompt, reference.states), reference.attention, strict=True
            )
        ]
        row: dict[str, Any] = {
            "answer": text,
            "attention": attention,
            "shares": dict(prompt.prefix.shares),
            "kv_error": None,
            "metrics": {
                "f1": f1(text, request.answers),
                "em": exact_match(text, request.answers),
                "gold_logprob": gold_mean,
                "gold_logprob_sum": gold_sum,
                "kl_to_full": self._kl(prompt, reference),
                **dict.fromkeys(("kv_mse_normalized", "k_rmse", "v_rmse")),
                "attention_error": sum(attention) / len(attention),
                "token_agreement": _agreement(self._cut(answer), self._cut(reference.forced)),
                "answer_equal": exact_match(text, [extract_answer(full_text)]),
                "ttft_ms": 1e3 * prompt.ttft_s,
                "repair_ms": 1e3 * prompt.repair_s,
                "macs": self._macs(prompt, len(request.question_ids)),
                "kv_bytes": self._target.geometry.kv_bytes(prompt.prefix.rows, self._target.dtype),
            },
        }
        kv = self._canonical(prompt, request)
        if kv is not None:
            error = kv.sub_(reference.joint)
            sums = square_sums(error, request.lengths)
            overall = relative_rms(sums, reference.joint_sums)
            row["kv_error"] = _listed(sums)
            row["metrics"] |= {
                "kv_mse_normalized": normalised_mse(error, self._statistics),
                **{f"{name}_rmse": overall[name]["by_region"]["all"] for name in ("k", "v")},
            }
        if own:
            row["kv_joint"] = _listed(reference.joint_sums)
        return row

    def _canonical(self, prompt: Prompted, request: EvaluationRequest) -> torch.Tensor | None:
        """The method's canonical KV, float32 `[T, L, H, 2, D]`, new memory; None when its rows are not the chunks'."""
        prefix = prompt.prefix
        if prefix.token_ids != joined(request.chunks):
            return None
        if prefix.rows < len(prefix.token_ids):  # the rest was computed behind what was handed over
            return from_hf_cache(prompt.cache, self._target.rotary, len(prefix.token_ids))[0]
        return torch.cat([torch.stack([k, v], dim=-2).transpose(0, 1).float() for k, v in prefix.kv])

    def _kl(self, prompt: Prompted, reference: Reference) -> float:
        p = reference.logprobs
        q = forced_logprobs(self._target, prompt.cache, prompt.logits_V, reference.forced)
        return float((p.exp() * (p - q)).sum(-1).mean())

    def _macs(self, prompt: Prompted, question: int) -> int:
        prefix = prompt.prefix
        given, computed = prefix.rows, len(prefix.token_ids) - prefix.rows
        return prefix.macs + self._costs.query(given, computed + question)

    def _cut(self, ids: Sequence[int]) -> list[int]:
        ends = end_ids(self._target)
        return [token for token in ids if token not in ends]

    def _text(self, ids: Sequence[int]) -> str:
        return self._target.tokenizer.decode(self._cut(ids), skip_special_tokens=True)


def _agreement(ours: Sequence[int], theirs: Sequence[int]) -> float:
    longest = max(len(ours), len(theirs))
    return sum(a == b for a, b in zip(ours, theirs, strict=False)) / longest if longest else 1.0


def _relative(error: torch.Tensor, reference: torch.Tensor) -> float:
    return float(error.double().square().sum().sqrt() / reference.double().square().sum().sqrt())


def _listed(sums: Sums) -> dict[str, Any]:
    """For JSON: seven digits, which is what float32 has."""
    return {name: _rounded(value.tolist()) for name, value in sums.items()}


def _rounded(value: Any) -> Any:
    return [_rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.7g}")
