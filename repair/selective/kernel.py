# SPDX-License-Identifier: Apache-2.0
"""The kernel: chosen rows of prefixes move up the target's layers and refresh their K and V (methods, section 0.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache.target import TargetLLM
from repair.selective.attention import attend
from repair.selective.prefix import AssembledPrefix

Context = torch.Tensor | None
"""Rows that others may attend to, int64, ascending; None is all of them."""


class RowPass:
    """Rows of one or more prefixes on their way up, through the target's own modules.

    In each layer: `keys_values`, `write`, then `narrow` to the rows that go on, which alone need queries, attention and
    MLP: `advance`. Rows can only become fewer, since a row enters a layer with what it left the one below with. Linear
    maps run over the rows of all prefixes at once; attention runs per prefix.

    Attributes:
        layer: where the rows are, 0 to `L`.
        rows: int64 per prefix, ascending: the rows that are under way.
    """

    def __init__(self, target: TargetLLM, prefixes: Sequence[AssembledPrefix], rows: Sequence[torch.Tensor]) -> None:
        """Embed the rows.

        Args:
            target: the target LLM.
            prefixes: what they attend to, and where their K and V go.
            rows: int64 per prefix, in any order, those of the question allowed; may be none.
        """
        self._layers = target.model.get_decoder().layers
        self._rotary = target.rotary
        self._prefixes = prefixes
        self.layer = 0
        self.rows = [each.unique() for each in rows]
        tokens = [prefix.token_ids[each] for prefix, each in zip(prefixes, self.rows, strict=True)]
        self._hidden = target.model.get_input_embeddings()(torch.cat(tokens))
        self._normed = self._norm()

    @property
    def over(self) -> bool:
        """Nothing is left to do: no rows are under way, or all layers are behind them."""
        return self.layer == len(self._layers) or not len(self._hidden)

    def keys_values(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This layer's canonical keys and values `[n, H, D]` of the rows, per prefix; nothing is written."""
        attention = self._layers[self.layer].self_attn
        k = _heads(attention, "k", self._normed).split(self._sizes())
        v = _heads(attention, "v", self._normed).split(self._sizes())
        return list(zip(k, v, strict=True))

    def write(self, fresh: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put `keys_values` of the rows into the prefixes."""
        for prefix, rows, (k, v) in zip(self._prefixes, self.rows, fresh, strict=True):
            prefix.put(self.layer, rows, k, v, self._rotary)

    def narrow(self, rows: Sequence[torch.Tensor]) -> None:
        """Let go of all but `rows`, int64 per prefix, ascending.

        Raises:
            ValueError: some are not under way.
        """
        kept, start = [], 0
        for have, want in zip(self.rows, rows, strict=True):
            place = torch.searchsorted(have, want)
            if len(want) > len(have) or not torch.equal(have[place.clamp(max=max(len(have) - 1, 0))], want):
                raise ValueError(f"rows that were let go below layer {self.layer} cannot come back")
            kept.append(start + place)
            start += len(have)
        index = torch.cat(kept)
        self.rows = list(rows)
        if len(index) < len(self._hidden):
            self._hidden, self._normed = self._hidden[index], self._normed[index]

    def queries(self) -> list[torch.Tensor]:
        """This layer's queries `[n, Q, D]` of the rows, rotated to their positions, per prefix."""
        q = _heads(self._layers[self.layer].self_attn, "q", self._normed)
        positions = [prefix.positions[rows] for prefix, rows in zip(self._prefixes, self.rows, strict=True)]
        return list(self._rotary.rotate(q, torch.cat(positions)).split(self._sizes()))

    def advance(self, contexts: Sequence[Context] | None = None, queries: Sequence[torch.Tensor] | None = None) -> None:
        """Attention and MLP: to the next layer.

        Args:
            contexts: what the rows may attend to besides themselves, per prefix; None is everything before them.
            queries: what `queries` gave for these rows, if it was asked already.
        """
        layer = self._layers[self.layer]
        mixed = [
            attend(q, prefix, self.layer, rows, context, layer.self_attn.scaling)
            for q, prefix, rows, context in zip(
                self.queries() if queries is None else queries,
                self._prefixes,
                self.rows,
                [None] * len(self.rows) if contexts is None else contexts,
                strict=True,
            )
            if len(rows)
        ]
        self._hidden = self._hidden + layer.self_attn.o_proj(torch.cat(mixed))
        self._hidden = self._hidden + layer.mlp(layer.post_attention_layernorm(self._hidden))
        self.layer += 1
        if not self.over:
            self._normed = self._norm()

    def _norm(self) -> torch.Tensor:
        return self._layers[self.layer].input_layernorm(self._hidden)

    def _sizes(self) -> list[int]:
        return [len(rows) for rows in self.rows]


def recompute(
    target: TargetLLM,
    prefixes: Sequence[AssembledPrefix],
    rows: Sequence[Sequence[torch.Tensor]],
    contexts: Sequence[Sequence[Context]] | None = None,
) -> None:
    """Refresh, in place, the K and V of selected rows; every other row keeps its stale KV.

    Args:
        target: the target LLM.
        prefixes: what to work on.
        rows: of each prefix, for each layer, the rows whose K and V are refreshed there; each a subset of the one
            before, since a row reaches a layer only through all layers below it.
        contexts: of each prefix, for each layer, what its rows may attend to besides themselves; None is everything.
    """
    run = RowPass(target, prefixes, [layers[0] for layers in rows])
    climb(run, rows, contexts)


def climb(
    run: RowPass, rows: Sequence[Sequence[torch.Tensor]], contexts: Sequence[Sequence[Context]] | None = None
) -> None:
    """`recompute` from the layer at which `run` is."""
    while not run.over:
        run.write(run.keys_values())
        above = run.layer + 1
        # Attention and MLP only serve the layer above, and so only the rows that are refreshed there.
        run.narrow([layers[above] if above < len(layers) else layers[0][:0] for layers in rows])
        if run.over:
            return
        run.advance(None if contexts is None else [layers[run.layer] for layers in contexts])


def _heads(attention: torch.nn.Module, which: str, x: torch.Tensor) -> torch.Tensor:
    """`[n, E]` to `[n, heads, D]`, normed in families that norm them (Qwen3)."""
    heads = getattr(attention, f"{which}_proj")(x).unflatten(1, (-1, attention.head_dim))
    norm = getattr(attention, f"{which}_norm", None)
    return heads if norm is None else norm(heads)
