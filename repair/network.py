# SPDX-License-Identifier: Apache-2.0
"""The repair network of CacheRepair: predicts what independently computed chunk caches lack (methods, section 3).

Shape legend: `B` requests, `T` tokens, `N` all tokens of a batch laid end to end, `L` layers, `H` KV heads, `D` head
size, the axis of size 2 is (K, V), `S = 2 L H` segments in that order, `r` segment width, `d` network width, `E` hidden
size of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, model_validator
from torch import nn

from kvcache.geometry import Geometry
from kvcache.settings import Attention
from repair.visibility import Visibility, compiled_flex, has_flex

_EXACT_LAST = 3
"""Blocks at the end that never use FlexAttention."""
_TOGETHER = 4
"""Segments encoded in one product."""


class RepairConfig(BaseModel):
    """Sizes and variants of a repair network; the keys of a checkpoint's `repair_config` that we know."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    d_b: PositiveInt
    """Width."""
    n_blocks: PositiveInt
    """Repair blocks."""
    n_heads: PositiveInt
    """Attention heads per block."""
    d_seg: PositiveInt
    """Width `r` of the encoding of one segment (layer, head, K or V) of a token."""
    mlp_ratio: PositiveFloat = 3.0
    """Hidden width of a block's MLP over `d_b`."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the network's own rotary embedding; it has nothing to do with the target's."""
    attention: Attention = "block_causal"
    """What a token sees; in a checkpoint this is the top-level key `repair_attention`."""
    reinject: bool = True
    """Give the stale encoding to every block again; False gives it at the entrance only."""

    @model_validator(mode="after")
    def _heads_divide(self) -> RepairConfig:
        if self.d_b % (2 * self.n_heads):
            raise ValueError(f"d_b {self.d_b} must be an even multiple of n_heads {self.n_heads}")
        return self

    @property
    def mlp_width(self) -> int:
        """Hidden width of a block's MLP."""
        return int(self.d_b * self.mlp_ratio)

    def macs(self, geometry: Geometry, tokens: int) -> int:
        """Dense matrix multiply-accumulates of one repair, attention counted as tokens x tokens."""
        d, segments = self.d_b, n_segments(geometry)
        kv = segments * geometry.head_dim
        block = 4 * d * d + 2 * d * self.mlp_width + (d * d if self.reinject else 0)
        linear = kv * self.d_seg + segments * self.d_seg * d + (geometry.hidden_size + 2 * d) * d
        return tokens * (linear + self.n_blocks * block + d * kv) + tokens * tokens * 2 * d * self.n_blocks


SIZES = {
    "S": RepairConfig(d_b=256, n_blocks=5, n_heads=4, d_seg=8),
    "M": RepairConfig(d_b=512, n_blocks=6, n_heads=8, d_seg=16),
    "L": RepairConfig(d_b=704, n_blocks=6, n_heads=11, d_seg=24),
}
"""The published capacities (those of the 3B target; larger targets widen some)."""


def n_segments(geometry: Geometry) -> int:
    """`S`: keys and values of every layer and head."""
    return 2 * geometry.n_layers * geometry.n_kv_heads


class StaleEncoder(nn.Module):
    """An affine map of its own for each segment, then one linear map over all of them."""

    def __init__(self, segments: int, head_dim: int, width: int, d_b: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(segments, head_dim, width).normal_(std=0.02))
        self.b = nn.Parameter(torch.zeros(segments, width))
        self.out = nn.Linear(segments * width, d_b)
        self.norm = nn.LayerNorm(d_b)

    def forward(self, stale_NSD: torch.Tensor, sigma_SD: torch.Tensor) -> torch.Tensor:
        """`[N, S, D]` to `[N, d]`.

        Dividing by sigma and adding `b` are done on the weights, which are smaller than the cache. A few segments share
        a block-diagonal product: its zeros cost less than products of eight columns do. Letters: `g` groups of `s = t`
        segments, `e` and `f` all values of a group before and after.
        """
        segments, head_dim, width = self.W.shape
        together = _TOGETHER if segments % _TOGETHER == 0 else 2  # keys and values: the number is even
        W_gsDtr = (self.W / sigma_SD[:, :, None]).view(-1, together, head_dim, 1, width)
        W_gsDtr = W_gsDtr * torch.eye(together, device=W_gsDtr.device)[:, None, :, None]
        stale_gNe = stale_NSD.reshape(len(stale_NSD), -1, together * head_dim).transpose(0, 1)
        encoded_gNf = torch.bmm(stale_gNe, W_gsDtr.view(-1, together * head_dim, together * width))
        bias_d = self.out.bias + (self.out.weight * self.b.flatten()).sum(1)
        return self.norm(F.linear(encoded_gNf.transpose(0, 1).flatten(1), self.out.weight, bias_d))


class SelfAttention(nn.Module):
    """Multi-head attention with rotary embedding on the token's index in its prefix."""

    def __init__(self, d_b: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_b, 3 * d_b, bias=False)
        self.proj = nn.Linear(d_b, d_b, bias=False)

    def forward(
        self, x_Nd: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], visibility: Visibility, flex: bool
    ) -> torch.Tensor:
        qkv = self.qkv(x_Nd).unflatten(1, (3, self.n_heads, -1))
        qk, v = qkv[:, :2], qkv[:, 2]
        cos, sin = rope
        qk = (qk * cos).addcmul_(qk.roll(qk.shape[-1] // 2, dims=-1), sin).to(v.dtype)  # rolled: the halves swapped
        q, k, v = (x.transpose(0, 1)[None] for x in (qk[:, 0], qk[:, 1], v))
        mixed = visibility.attend_flex(q, k, v, compiled_flex()) if flex else visibility.attend(q, k, v)
        return self.proj(mixed[0].transpose(0, 1).flatten(1))


class Block(nn.Module):
    """Attention and MLP behind pre-norms with learned shift, scale and gate; the identity when fresh."""

    def __init__(self, config: RepairConfig) -> None:
        super().__init__()
        self.attn = SelfAttention(config.d_b, config.n_heads)
        self.mlp = nn.Sequential(
            nn.Linear(config.d_b, config.mlp_width), nn.SiLU(), nn.Linear(config.mlp_width, config.d_b)
        )
        self.ada = nn.Parameter(torch.zeros(6 * config.d_b))

    def forward(
        self, h_Nd: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], visibility: Visibility, flex: bool
    ) -> torch.Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.ada.chunk(6)
        # LN(h) * (1 + scale) + shift is a layer norm with that weight and bias.
        mixed = self.attn(F.layer_norm(h_Nd, shift_a.shape, 1 + scale_a, shift_a), rope, visibility, flex)
        h_Nd = torch.addcmul(h_Nd, mixed.to(h_Nd.dtype), gate_a)
        hidden = self.mlp(F.layer_norm(h_Nd, shift_m.shape, 1 + scale_m, shift_m))
        return torch.addcmul(h_Nd, hidden.to(h_Nd.dtype), gate_m)


class RepairNetwork(nn.Module):
    """Predicts `joint - stale` for every token of a prefix, from stale KV and token ids, without the target's layers.

    State-dict names and shapes are the published ones. The token embedding is the target's, frozen, shared with it,
    and not part of a checkpoint. A fresh network repairs nothing: its output is the stale KV.

    On CPU attention is exact. On CUDA without gradients the first blocks use FlexAttention and the last three exact
    attention, as the published serving policy says.

    Attributes:
        config: sizes and variants.
        geometry: the target's.
        sigma_stale: RMS of each coordinate of stale KV, float32 `[L, H, 2, D]`; ones until the trainer sets it.
        sigma_delta: RMS of each coordinate of `joint - stale`, likewise.
    """

    sigma_stale: torch.Tensor
    sigma_delta: torch.Tensor

    def __init__(self, config: RepairConfig, geometry: Geometry, embedding: nn.Embedding) -> None:
        """Make a fresh network, in float32, from the global random generator.

        Args:
            config: sizes and variants.
            geometry: the target's.
            embedding: the target's input embedding `[vocabulary, E]`, any float dtype.
        """
        super().__init__()
        if embedding.embedding_dim != geometry.hidden_size:
            raise ValueError(f"embedding is {embedding.embedding_dim} wide, the target {geometry.hidden_size}")
        self.config, self.geometry = config, geometry
        d, segments = config.d_b, n_segments(geometry)
        # Another module on the same memory: moving or casting the network must not touch the target.
        self.tok_embed = nn.Embedding.from_pretrained(embedding.weight.detach(), freeze=True)
        # The order of construction is that of the published training, for equal numbers from an equal seed.
        self.stale_enc = StaleEncoder(segments, geometry.head_dim, config.d_seg, d)
        self.tok_proj = nn.Linear(geometry.hidden_size, d)
        self.fuse = nn.Linear(2 * d, d)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_blocks))
        if config.reinject:
            with torch.random.fork_rng(devices=[]):
                self.stale_reinject = nn.ModuleList(nn.Linear(d, d) for _ in range(config.n_blocks))
            _zero(*self.stale_reinject)
        self.ln_f = nn.LayerNorm(d)
        self.v_head = nn.Linear(d, segments * geometry.head_dim)
        _zero(self.v_head)
        shape = (geometry.n_layers, geometry.n_kv_heads, 2, geometry.head_dim)
        self.register_buffer("sigma_delta", torch.ones(shape))
        self.register_buffer("sigma_stale", torch.ones(shape))
        self._head: tuple[list | None, torch.Tensor] | None = None

    @classmethod
    def load(cls, directory: str | Path, embedding: nn.Embedding) -> RepairNetwork:
        """Load a checkpoint with only the target's embedding table at hand; see `repair.checkpoint.load_network`."""
        from repair.checkpoint import load_network

        return load_network(directory, embedding)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.sigma_stale.device

    def forward(self, stale: torch.Tensor, tokens: torch.Tensor, chunk_ids: torch.Tensor) -> torch.Tensor:
        """Predict the normalised residual.

        Padding costs nothing: it is taken out before the first matrix product and put back, as zeros, at the end.

        Args:
            stale: canonical KV `[B, T, L, H, 2, D]`, any float dtype.
            tokens: target-tokenizer ids, int `[B, T]`.
            chunk_ids: int `[B, T]`: 0, 1, ... in order, each chunk's tokens together; -1 is padding, at the end only.

        Returns:
            `(joint - stale) / sigma_delta`, predicted, float32 `[B, T, L, H, 2, D]`.

        Raises:
            ValueError: shapes that do not belong together, or chunk ids out of order.
        """
        self._check(stale, tokens, chunk_ids)
        requests = chunk_lengths(chunk_ids)
        rows = chunk_ids.reshape(-1) >= 0
        flat, ids = stale.flatten(0, 1), tokens.reshape(-1)
        if rows.all():
            return self.forward_packed(flat, ids, requests).view(stale.shape)
        rows = rows.to(self.device)
        residual = torch.zeros(stale.shape, device=self.device).flatten(0, 1)
        index = rows.nonzero()[:, 0]
        packed = self.forward_packed(flat.to(self.device)[index], ids.to(self.device)[index], requests)
        return residual.index_copy(0, index, packed).view(stale.shape)

    def forward_packed(
        self, stale: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """`forward` for requests laid end to end without padding.

        Args:
            stale: canonical KV `[N, L, H, 2, D]`, any float dtype.
            tokens: int `[N]`.
            requests: chunk lengths per request, adding up to `N`.

        Returns:
            Normalised residual, float32 `[N, L, H, 2, D]`.
        """
        if not len(tokens):
            return torch.zeros(stale.shape, device=self.device)
        visibility = Visibility.of(requests, self.config.attention, self.device)
        return self.v_head(self._hidden(stale, tokens, visibility)).float().view(stale.shape)

    @torch.no_grad()
    def repair(self, stale: torch.Tensor, tokens: torch.Tensor, chunk_ids: torch.Tensor) -> torch.Tensor:
        """Repair stale KV: arguments as in `forward`; returns canonical KV of the same shape, dtype and device."""
        self._check(stale, tokens, chunk_ids)
        rows = (chunk_ids.reshape(-1) >= 0).nonzero()[:, 0].to(stale.device)
        if not len(rows):
            return stale.clone()
        flat, ids = stale.flatten(0, 1), tokens.reshape(-1).to(stale.device)
        visibility = Visibility.of(chunk_lengths(chunk_ids), self.config.attention, self.device)
        if len(rows) == len(flat):
            packed = flat.to(self.device, torch.float32, copy=True, memory_format=torch.contiguous_format)
            return self.repair_packed_(packed, ids, visibility).to(stale).view(stale.shape)
        packed = self.repair_packed_(flat[rows].to(self.device, torch.float32), ids[rows], visibility)
        return flat.index_copy(0, rows, packed.to(stale)).view(stale.shape)

    @torch.no_grad()
    def repair_packed_(self, stale: torch.Tensor, tokens: torch.Tensor, visibility: Visibility) -> torch.Tensor:
        """Repair requests laid end to end, in place: for long prefixes each pass over a cache-sized tensor counts.

        Args:
            stale: canonical KV, float32 `[N, L, H, 2, D]`, contiguous, on the network's device; overwritten.
            tokens: int `[N]`.
            visibility: of the same requests, with this network's attention.

        Returns:
            `stale`, now repaired.
        """
        if not len(tokens):
            return stale
        h_Nd = self._hidden(stale, tokens, visibility).float()
        stale.view(len(tokens), -1).addmm_(F.pad(h_Nd, (0, 1), value=1.0), self._scaled_head().T)
        return stale

    def _scaled_head(self) -> torch.Tensor:
        """The head in units of the cache, its bias a last column: one matrix product then adds into the cache.

        Kept until a tensor it is made of changes or moves: making it costs a twentieth of a small network's repair.
        """
        parts = (self.v_head.weight, self.v_head.bias, self.sigma_delta)
        # Tensors made in inference mode do not say when they change: nothing is kept for them.
        known = not any(part.is_inference() for part in parts)
        made_of = [(part.data_ptr(), part._version, part.dtype) for part in parts] if known else None
        if made_of is None or self._head is None or self._head[0] != made_of:
            head = torch.cat([self.v_head.weight, self.v_head.bias[:, None]], dim=1)
            self._head = made_of, head.mul_(self.sigma_delta.view(-1, 1))
        return self._head[1]

    def _hidden(self, stale: torch.Tensor, tokens: torch.Tensor, visibility: Visibility) -> torch.Tensor:
        """Everything up to the head: `[N, d]`."""
        head_dim, device = self.geometry.head_dim, self.device
        stale_NSD = stale.to(device, torch.float32).reshape(len(tokens), -1, head_dim)
        f_Nd = self.stale_enc(stale_NSD, self.sigma_stale.view(-1, head_dim))
        tok_Nd = self.tok_proj(self.tok_embed(tokens.to(device)).float())
        h_Nd = self.fuse(torch.cat([f_Nd, tok_Nd.to(f_Nd.dtype)], dim=1)).float()
        rope = self._rope(visibility.positions)
        for index, block in enumerate(self.blocks):
            if self.config.reinject:
                h_Nd = h_Nd + self.stale_reinject[index](f_Nd)
            flex = index < self.config.n_blocks - _EXACT_LAST and has_flex(h_Nd)
            h_Nd = block(h_Nd, rope, visibility, flex)
        return self.ln_f(h_Nd)

    def _rope(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.config.d_b // self.config.n_heads
        inv_freq = self.config.rope_theta ** (-torch.arange(0, size, 2, device=positions_N.device).float() / size)
        angle = (positions_N[:, None].float() * inv_freq)[:, None, None]  # [N, q or k, heads, half]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def _check(self, stale: torch.Tensor, tokens: torch.Tensor, chunk_ids: torch.Tensor) -> None:
        g = self.geometry
        want = (*tokens.shape, g.n_layers, g.n_kv_heads, 2, g.head_dim)
        if tokens.ndim != 2 or tuple(stale.shape) != want:
            raise ValueError(f"stale KV is {tuple(stale.shape)}, want [B, T, L, H, 2, D] = {want}")
        if chunk_ids.shape != tokens.shape:
            raise ValueError(f"chunk_ids are {tuple(chunk_ids.shape)}, tokens {tuple(tokens.shape)}: want both [B, T]")


def chunk_lengths(chunk_ids: torch.Tensor) -> list[list[int]]:
    """Chunk lengths per request of chunk ids `[B, T]`.

    Raises:
        ValueError: ids that do not count 0, 1, ... or padding (-1) that is not at the end.
    """
    result = []
    for index, row in enumerate(chunk_ids.tolist()):
        groups = [(chunk, len(list(group))) for chunk, group in groupby(row)]
        if groups and groups[-1][0] == -1:
            groups.pop()
        if [chunk for chunk, _ in groups] != list(range(len(groups))):
            raise ValueError(f"chunk_ids of request {index} must count 0, 1, ... in order, with -1 only at the end")
        result.append([length for _, length in groups])
    return result


def _zero(*layers: nn.Module) -> None:
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
