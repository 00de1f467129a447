# SPDX-License-Identifier: Apache-2.0
"""Which errors of a key matter: second moments of the queries that look at it."""

from __future__ import annotations

import torch

from kvcache.chunk import ChunkKV
from kvcache.target import TargetLLM
from pipelines.training.pairs import TrainingPair
from pipelines.training.statistics import Statistics
from repair.selective.kernel import RowPass
from repair.selective.prefix import AssembledPrefix

_TINY = 1e-30


class ScoreMoments:
    """Sums over training pairs, in float64; those of several workers can be added.

    A key at position n and a query at position m >= n, both rotated, have the score `q_m . R_n k` of the canonical key
    `k`: the query that `k` sees is `R_n^-1 q_m`. For each query one n is drawn, evenly from 0 to m.

    Attributes:
        queries: `sum u u^T` of the queries as keys see them, all heads of a group together, `[L, H, D, D]`.
        residual: `sum r r^T` of the keys' residual, `[L, H, D, D]`.
    """

    def __init__(self, target: TargetLLM, seed: int) -> None:
        self._target = target
        self._random = torch.Generator().manual_seed(seed)
        g = target.geometry
        self.queries = torch.zeros(g.n_layers, g.n_kv_heads, g.head_dim, g.head_dim, dtype=torch.float64)
        self.residual = torch.zeros_like(self.queries)

    @torch.inference_mode()
    def add(self, pair: TrainingPair) -> None:
        """Count one pair in: its prefix passes through the target once more."""
        residual = pair.residual[:, :, :, 0].permute(1, 2, 3, 0).double()  # [L, H, D, T]
        self.residual += residual @ residual.mT
        joint = (pair.stale + pair.residual).transpose(0, 1)
        whole = ChunkKV(tuple(pair.tokens.tolist()), joint[..., 0, :], joint[..., 1, :])
        prefix = AssembledPrefix.of(self._target, [whole])
        run = RowPass(self._target, [prefix], [prefix.positions])
        places = torch.arange(len(pair.tokens))
        seen_from = (torch.rand(len(places), generator=self._random) * (places + 1)).long()
        while not run.over:
            (rotated,) = run.queries()
            queries = self._target.rotary.unrotate(rotated.float(), seen_from.to(rotated.device))
            grouped = queries.unflatten(1, (self.queries.shape[1], -1)).permute(1, 3, 0, 2).flatten(2)  # [H, D, T * G]
            self.queries[run.layer] += (grouped @ grouped.mT).cpu()
            run.advance(queries=[rotated])

    def metric(self, statistics: Statistics) -> torch.Tensor:
        """`ScoresAndValues.metric`: a key's residual has, on average over the pairs, the length of a normalised one.

        Coordinates without weight count nothing, neither their own error nor for others.

        Args:
            statistics: of the same training data.

        Returns:
            float32 `[L, H, D, D]`.
        """
        sigma, weight = (part[:, :, 0].double() for part in (statistics.sigma_delta, statistics.weight))
        values, vectors = torch.linalg.eigh(self.queries)
        root = values.clamp_min(0).sqrt()[..., None] * vectors.mT * weight[..., None, :]
        length = (root @ self.residual @ root.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
        tokens_of_unit = (self.residual.diagonal(dim1=-2, dim2=-1) * weight / sigma.square()).sum(-1)
        scale = (tokens_of_unit / length.clamp_min(_TINY)).sqrt()
        return (scale[..., None, None] * root * sigma[..., None, :]).float()
