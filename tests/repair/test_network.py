# SPDX-License-Identifier: Apache-2.0
"""The repair network against a plain reading of its specification, and what must and must not depend on what."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from kvcache import compile_stale
from kvcache.geometry import Geometry
from kvcache.settings import Attention
from repair.network import SIZES, RepairConfig, RepairNetwork, StaleEncoder
from repair.visibility import Visibility
from tests.repair.methods import TINY, random_network

VARIANTS = get_args(Attention)
LENGTHS = [7, 1, 12, 30]


def inputs(target, lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    chunks = [torch.randint(3, 500, (n,), generator=generator).tolist() for n in lengths]
    return compile_stale(target, chunks)


def padded(target, batch_lengths, width):
    """Requests of several lengths as one right-padded batch, and each alone."""
    alone = [inputs(target, lengths, seed) for seed, lengths in enumerate(batch_lengths)]
    shape = alone[0][0].shape
    stale = torch.full((len(alone), width, *shape[2:]), 3.0)
    tokens = torch.zeros(len(alone), width, dtype=torch.long)
    chunk_ids = torch.full((len(alone), width), -1)
    for row, (one, ids, chunks) in enumerate(alone):
        stale[row, : ids.shape[1]], tokens[row, : ids.shape[1]] = one[0], ids[0]
        chunk_ids[row, : ids.shape[1]] = chunks[0]
    return (stale, tokens, chunk_ids), alone


def dense_mask(chunk_ids, attention):
    """Query i sees key j, straight from the definitions."""
    chunk, index = chunk_ids, torch.arange(len(chunk_ids))
    return {
        "block_causal": chunk[:, None] >= chunk[None],
        "token_causal": index[:, None] >= index[None],
        "bidirectional": torch.ones(len(chunk), len(chunk), dtype=torch.bool),
        "block_diagonal": chunk[:, None] == chunk[None],
    }[attention]


@torch.no_grad()
def by_the_book(network, stale, tokens, mask):
    """One request, `[T, L, H, 2, D]`, step by step as the method is written down, from the state dict alone."""
    s, config = {name: tensor.double() for name, tensor in network.state_dict().items()}, network.config
    n, d = len(tokens), config.d_b

    def linear(name, x):
        return x @ s[f"{name}.weight"].T + s.get(f"{name}.bias", 0)

    def norm(x, weight=1.0, bias=0.0):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + 1e-5) * weight + bias

    def turn(x):  # rotate-half, base 10000, on the token's index
        half = x.shape[-1] // 2
        angle = torch.arange(n)[:, None] / 10000.0 ** (torch.arange(half) / half)
        cos, sin = angle.cos().double(), angle.sin().double()
        return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)

    x = (stale.double() / s["sigma_stale"]).reshape(n, -1, network.geometry.head_dim)
    encoded = torch.stack([x[:, i] @ s["stale_enc.W"][i] + s["stale_enc.b"][i] for i in range(x.shape[1])], 1)
    f = norm(linear("stale_enc.out", encoded.reshape(n, -1)), s["stale_enc.norm.weight"], s["stale_enc.norm.bias"])
    h = linear("fuse", torch.cat([f, linear("tok_proj", s["tok_embed.weight"][tokens])], -1))
    for b in range(config.n_blocks):
        if config.reinject:
            h = h + linear(f"stale_reinject.{b}", f)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = s[f"blocks.{b}.ada"].split(d)
        q, k, v = linear(f"blocks.{b}.attn.qkv", norm(h) * (1 + scale_a) + shift_a).split(d, -1)
        size, heads = d // config.n_heads, []
        for i in range(config.n_heads):
            part = slice(i * size, (i + 1) * size)
            score = turn(q[:, part]) @ turn(k[:, part]).T / math.sqrt(size)
            heads.append(score.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, part])
        h = h + gate_a * linear(f"blocks.{b}.attn.proj", torch.cat(heads, -1))
        hidden = linear(f"blocks.{b}.mlp.0", norm(h) * (1 + scale_m) + shift_m)
        h = h + gate_m * linear(f"blocks.{b}.mlp.2", hidden * torch.sigmoid(hidden))
    return linear("v_head", norm(h, s["ln_f.weight"], s["ln_f.bias"])).reshape(stale.shape)


@pytest.mark.parametrize("reinject", [True, False])
@pytest.mark.parametrize("attention", VARIANTS)
def test_follows_the_specification(tiny, attention, reinject):
    config = TINY.model_copy(update={"attention": attention, "reinject": reinject})
    network = random_network(tiny, config)
    stale, tokens, chunk_ids = inputs(tiny)
    want = by_the_book(network, stale[0], tokens[0], dense_mask(chunk_ids[0], attention))
    got = network(stale, tokens, chunk_ids)
    assert got.dtype == torch.float32 and got.shape == stale.shape
    assert (got[0] - want).abs().max() < 1e-4 * want.abs().max()
    repaired = network.repair(stale, tokens, chunk_ids)
    assert (repaired[0] - (stale[0] + want * network.sigma_delta)).abs().max() < 1e-4 * want.abs().max()


@torch.no_grad()
def test_segments_are_encoded_one_by_one_however_many_there_are():
    for segments in (2, 6, 8):
        encoder = StaleEncoder(segments, head_dim=16, width=5, d_b=24)
        encoder.b.normal_()
        stale, sigma = torch.randn(7, segments, 16), 0.5 + torch.rand(segments, 16)
        pieces = [(stale[:, s] / sigma[s]) @ encoder.W[s] + encoder.b[s] for s in range(segments)]
        assert torch.allclose(encoder(stale, sigma), encoder.norm(encoder.out(torch.cat(pieces, dim=1))), atol=1e-5)


COUNTS = {
    (36, 2, 128, 2048): {(256, 5, 4, 8): 9_456_256, (512, 6, 8, 16): 29_844_224, (704, 6, 11, 24): 51_068_480},
    (32, 8, 128, 4096): {(256, 5, 4, 8): 23_219_712, (512, 6, 8, 16): 58_831_360, (704, 6, 11, 24): 93_075_648},
    (48, 8, 128, 5120): {(320, 5, 5, 8): 41_809_280, (640, 6, 10, 16): 103_638_656, (832, 7, 13, 24): 158_615_808},
}
"""Published parameter counts: Qwen2.5-3B, Llama-3.1-8B, Qwen2.5-14B; without the shared embedding."""


def published(shape, sizes):
    layers, heads, head_dim, hidden = shape
    geometry = Geometry(layers, heads, head_dim, hidden // head_dim, hidden, 16, 32768)
    d_b, n_blocks, n_heads, d_seg = sizes
    return geometry, RepairConfig(d_b=d_b, n_blocks=n_blocks, n_heads=n_heads, d_seg=d_seg)


@pytest.mark.parametrize("shape, sizes", [(shape, sizes) for shape, column in COUNTS.items() for sizes in column])
def test_published_parameter_counts(shape, sizes):
    geometry, config = published(shape, sizes)
    with torch.device("meta"):
        network = RepairNetwork(config, geometry, torch.nn.Embedding(16, geometry.hidden_size))
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == COUNTS[shape][sizes]


@pytest.mark.parametrize("size, linear, attention", [("S", 9.42e6, 2560), ("M", 29.79e6, 6144), ("L", 51.00e6, 8448)])
def test_published_costs(size, linear, attention):
    geometry, _ = published((36, 2, 128, 2048), (256, 5, 4, 8))
    one, two = (SIZES[size].macs(geometry, tokens) for tokens in (1, 2))
    assert (two - 2 * one) / 2 == attention
    assert one - attention == pytest.approx(linear, rel=1e-3)


def test_a_fresh_network_gives_stale_bit_for_bit(tiny):
    network = RepairNetwork(TINY, tiny.geometry, tiny.model.get_input_embeddings())
    stale, tokens, chunk_ids = inputs(tiny)
    assert torch.equal(network.repair(stale, tokens, chunk_ids), stale)
    half = stale.bfloat16()
    assert torch.equal(network.repair(half, tokens, chunk_ids), half)
    assert not network(stale, tokens, chunk_ids).any()


@pytest.mark.parametrize("name", ["v_head.weight", "v_head.bias", "sigma_delta"])
def test_a_repair_follows_weights_that_change(tiny, name):
    network = random_network(tiny)
    stale, tokens, chunk_ids = inputs(tiny)
    network.repair(stale, tokens, chunk_ids)
    with torch.no_grad():
        network.state_dict()[name].mul_(3.0)
    expected = stale + network(stale, tokens, chunk_ids) * network.sigma_delta
    torch.testing.assert_close(network.repair(stale, tokens, chunk_ids), expected, rtol=1e-5, atol=1e-5)
    network.load_state_dict(random_network(tiny, seed=9).state_dict(), strict=False)
    expected = stale + network(stale, tokens, chunk_ids) * network.sigma_delta
    torch.testing.assert_close(network.repair(stale, tokens, chunk_ids), expected, rtol=1e-5, atol=1e-5)


def test_a_network_made_in_inference_mode_repairs_and_follows_its_weights(tiny):
    stale, tokens, chunk_ids = inputs(tiny)
    with torch.inference_mode():
        network = random_network(tiny)
        network.repair(stale, tokens, chunk_ids)
        network.v_head.weight.mul_(3.0)
        expected = stale + network(stale, tokens, chunk_ids) * network.sigma_delta
        torch.testing.assert_close(network.repair(stale, tokens, chunk_ids), expected, rtol=1e-5, atol=1e-5)


def test_a_seed_gives_one_network_whatever_the_variant(tiny):
    """Reinjection layers are made aside from the random stream."""
    weights = []
    for reinject in (True, False):
        torch.manual_seed(5)
        config = TINY.model_copy(update={"reinject": reinject})
        weights.append(RepairNetwork(config, tiny.geometry, tiny.model.get_input_embeddings()).state_dict())
    for name in weights[1]:
        assert torch.equal(weights[0][name], weights[1][name]), name


def reach(network, stale, tokens, chunk_ids, changed):
    """Rows whose output changes when the stale KV of row `changed` does: bool `[T]`."""
    before = network(stale, tokens, chunk_ids)[0]
    other = stale.clone()
    other[0, changed] += 1.0
    return (network(other, tokens, chunk_ids)[0] != before).flatten(1).any(1)


def test_later_chunks_never_reach_earlier_ones(tiny):
    network, (stale, tokens, chunk_ids) = random_network(tiny), inputs(tiny)
    for row in (0, 6, 7, 8, 19, 20, 49):
        assert torch.equal(reach(network, stale, tokens, chunk_ids, row), chunk_ids[0] >= chunk_ids[0, row])


def test_a_later_token_id_never_reaches_earlier_chunks(tiny):
    network, (stale, tokens, chunk_ids) = random_network(tiny), inputs(tiny)
    before, other = network(stale, tokens, chunk_ids), tokens.clone()
    other[0, 25] += 1
    changed = (network(stale, other, chunk_ids) != before)[0].flatten(1).any(1)
    assert torch.equal(changed, chunk_ids[0] >= 3)


@pytest.mark.parametrize(
    "attention, sees",
    [
        ("token_causal", lambda i: i >= 8),
        ("bidirectional", lambda i: i >= 0),
        ("block_diagonal", lambda i: i // 12 == 0),
    ],
)
def test_reach_of_the_variants(tiny, attention, sees):
    network = random_network(tiny, TINY.model_copy(update={"attention": attention}))
    stale, tokens, chunk_ids = inputs(tiny, [12, 12, 12])
    assert torch.equal(reach(network, stale, tokens, chunk_ids, 8), sees(torch.arange(36)))


def test_order_of_tokens_matters(tiny):
    """Rotary on the index: two chunks, swapped, are not the same answer swapped."""
    network = random_network(tiny, TINY.model_copy(update={"attention": "bidirectional"}))
    stale, tokens, chunk_ids = inputs(tiny, [5, 5])
    swap = torch.tensor([5, 6, 7, 8, 9, 0, 1, 2, 3, 4])
    swapped = network(stale[:, swap], tokens[:, swap], chunk_ids)
    assert (swapped[:, swap] - network(stale, tokens, chunk_ids)).abs().max() > 1e-3


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("width", [96, 128, 256])
def test_a_padded_batch_is_each_request_alone(tiny, width, attention):
    network = random_network(tiny, TINY.model_copy(update={"attention": attention}))
    batch, alone = padded(tiny, [[50, 46], [3], [1, 1, 1, 20, 20], [40, 30]], width)
    residual, repaired = network(*batch), network.repair(*batch)
    for row, one in enumerate(alone):
        n = one[1].shape[1]
        want = network(*one)[0]
        assert (residual[row, :n] - want).abs().max() < 1e-5 * want.abs().max()
        assert not residual[row, n:].any()
        assert (repaired[row, :n] - network.repair(*one)[0]).abs().max() < 1e-4
        assert torch.equal(repaired[row, n:], batch[0][row, n:])


def test_gradients_pass_through_padding_and_variants(tiny):
    batch, _ = padded(tiny, [[10, 6], [3]], 20)
    for attention in VARIANTS:
        network = random_network(tiny, TINY.model_copy(update={"attention": attention}))
        network(*batch).square().mean().backward()
        for name, parameter in network.named_parameters():
            assert not parameter.requires_grad or parameter.grad.abs().sum() > 0, name
        assert network.tok_embed.weight.grad is None


def test_the_target_embedding_is_shared_and_left_alone(tiny):
    embedding = tiny.model.get_input_embeddings()
    network = RepairNetwork(TINY, tiny.geometry, embedding)
    assert network.tok_embed.weight.data_ptr() == embedding.weight.data_ptr()
    before = embedding.weight.clone()
    network.double()
    assert embedding.weight.dtype == torch.float32 and torch.equal(embedding.weight, before)


@pytest.mark.parametrize("attention", VARIANTS)
def test_the_block_mask_is_the_dense_mask(attention):
    """FlexAttention's tiles, made for GPUs, name exactly the pairs of the definition; checked by its CPU reference."""
    requests = [[100, 28, 130, 1, 1, 60], [200], [128, 128]]
    visibility = Visibility.of(requests, attention, torch.device("cpu"))
    n = len(visibility.positions)
    owner = torch.tensor([i for i, lengths in enumerate(requests) for _ in range(sum(lengths))])
    chunk = torch.tensor([c for lengths in requests for c, length in enumerate(lengths) for _ in range(length)])
    index = torch.arange(n)
    mask = owner[:, None] == owner[None]
    mask &= {
        "block_causal": chunk[:, None] >= chunk[None],
        "token_causal": index[:, None] >= index[None],
        "bidirectional": torch.ones(n, n, dtype=torch.bool),
        "block_diagonal": chunk[:, None] == chunk[None],
    }[attention]
    blocks = visibility.block_mask
    size, tiles = blocks.seq_lengths[0], blocks.seq_lengths[0] // 128
    got = torch.zeros(size, size, dtype=torch.bool)
    rows = torch.arange(size)
    for counts, columns, whole in (
        (blocks.kv_num_blocks, blocks.kv_indices, False),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
    ):
        for i in range(tiles):
            for j in columns[0, 0, i, : counts[0, 0, i]].tolist():
                tile = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
                got[tile] = whole or blocks.mask_mod(0, 0, rows[tile[0], None], rows[None, tile[1]])
    assert torch.equal(got[:n, :n], mask)
    assert torch.equal(got[n:], torch.eye(size, dtype=torch.bool)[n:])
    q, k, v = (torch.randn(1, 2, n, 16) for _ in "qkv")
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (visibility.attend(q, k, v) - dense).abs().max() < 1e-5
    assert (visibility.attend_flex(q, k, v, flex_attention) - dense).abs().max() < 1e-5


BAD = {
    "shape": (lambda s, t, c: (s[:, :, :1], t, c), "stale KV is"),
    "tokens": (lambda s, t, c: (s, t[:, :-1], c), "stale KV is"),
    "chunk_ids": (lambda s, t, c: (s, t, c[:, :-1]), "chunk_ids are"),
    "order": (lambda s, t, c: (s, t, c.flip(1)), "must count 0, 1"),
    "hole": (lambda s, t, c: (s, t, c.masked_fill(c == 1, -1)), "must count 0, 1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_inputs_that_do_not_belong_together(tiny, kind):
    network, (spoil, message) = random_network(tiny), BAD[kind]
    for call in (network, network.repair):
        with pytest.raises(ValueError, match=message):
            call(*spoil(*inputs(tiny)))


def test_an_empty_request_in_a_batch(tiny):
    network = random_network(tiny)
    (stale, tokens, chunk_ids), alone = padded(tiny, [[5, 5], [5, 6]], 12)
    chunk_ids[0] = -1
    got = network.repair(stale, tokens, chunk_ids)
    assert torch.equal(got[0], stale[0])
    assert (got[1, :11] - network.repair(*alone[1])[0]).abs().max() < 1e-4


def test_no_request_at_all(tiny):
    stale, tokens, chunk_ids = (each[:0] for each in inputs(tiny))
    assert random_network(tiny).repair(stale, tokens, chunk_ids).shape == stale.shape


def test_the_layout_of_the_memory_does_not_matter(tiny):
    """Stale KV is often a view: `kvcache.compile.pack` gives layers first."""
    network, (stale, tokens, chunk_ids) = random_network(tiny), inputs(tiny)
    view = stale.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous() and torch.equal(view, stale)
    for call in (network, network.repair):
        assert torch.equal(call(view, tokens, chunk_ids), call(stale, tokens, chunk_ids))
    assert torch.equal(view, stale)
