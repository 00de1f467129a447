# SPDX-License-Identifier: Apache-2.0
"""What passes of the target cost in dense matrix multiply-accumulates: the model behind CacheRepair's Table 19.

Attention is counted dense, rows x context, without the causal half. The formulas are ours (methods, section 0.6); they
give the six published rows within 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from kvcache.geometry import Geometry


@dataclass(frozen=True)
class CostModel:
    """Multiply-accumulates of one target.

    Attributes:
        n_layers: decoder layers.
        qkv: of one token in one layer, the query, key and value projections.
        linear: of one token in one layer, all linear maps.
        pair: of one (query, key) pair in one layer: scores and mixing, all heads.
        head: logits at one position.
    """

    n_layers: int
    qkv: int
    linear: int
    pair: int
    head: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> CostModel:
        """Read the sizes from a transformers config of a supported target."""
        g = Geometry.of(config)
        queries, keys = g.n_attention_heads * g.head_dim, g.n_kv_heads * g.head_dim
        qkv = g.hidden_size * (queries + 2 * keys)
        return cls(
            n_layers=g.n_layers,
            qkv=qkv,
            linear=qkv + queries * g.hidden_size + 3 * g.hidden_size * config.intermediate_size,
            pair=2 * queries,
            head=g.vocab_size * g.hidden_size,
        )

    def rows(self, rows: int, context: int) -> int:
        """`rows` tokens through one layer, each against `context` keys."""
        return rows * self.linear + rows * context * self.pair

    def full(self, prefix: int, question: int) -> int:
        """One prefill of prefix and question, up to the first token."""
        return self.n_layers * self.rows(prefix + question, prefix + question) + self.head

    def query(self, prefix: int, question: int) -> int:
        """The question over a prefix that is there, up to the first token."""
        return self.n_layers * self.rows(question, prefix + question) + self.head

    def selective(
        self, rows_per_layer: Sequence[int], context: int | Sequence[int], projected: int = 0, probe: int = 0
    ) -> int:
        """Selected rows recomputed, as the published tables count them; the query pass comes on top.

        A row counts whole in every layer in which its K and V are refreshed, the last included, although nothing needs
        its attention and MLP there.

        Args:
            rows_per_layer: selected rows of each layer.
            context: keys each of them is set against: prefix and question, or the keys of each layer's context.
            projected: rows for which one layer makes queries, keys and values and no more (CacheBlend's check layer).
            probe: what a pass of the question that scores the prefix costs, see `rows`.
        """
        contexts = [context] * len(rows_per_layer) if isinstance(context, int) else context
        layers = sum(self.rows(rows, keys) for rows, keys in zip(rows_per_layer, contexts, strict=True))
        return layers + projected * self.qkv + probe
