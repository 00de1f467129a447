# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the published format, and a clear no, which names file and field, to everything that does not fit."""

from __future__ import annotations

import copy
import hashlib
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from kvcache import compile_stale
from kvcache.geometry import Geometry
from repair import RepairNetwork, load_repairer
from repair.checkpoint import load_network, save_checkpoint
from repair.checkpoint_config import CheckpointError
from repair.network import RepairConfig
from tests.repair.methods import TINY, checkpoint, random_network
from tests.tiny import tiny_target

CHUNKS = [[5, 6, 7], [8, 9, 10, 11], [12]]


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return Path(checkpoint(tiny, tmp_path / "network"))


def edit(folder: Path, change) -> None:
    """Change `config.json`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def retensor(folder: Path, change) -> None:
    """Change the tensors of `model.safetensors`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_round_trip(tiny, folder):
    saved, loaded = random_network(tiny), load_repairer(folder, tiny)
    assert loaded.config == saved.config and not loaded.training
    for (name, one), (other_name, two) in zip(saved.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other_name and torch.equal(one, two)
    stale = compile_stale(tiny, CHUNKS)
    assert torch.equal(saved.repair(*stale), loaded.repair(*stale))
    assert loaded.tok_embed.weight.data_ptr() == tiny.model.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize(
    "variant", [{"attention": "token_causal"}, {"reinject": False}, {"attention": "bidirectional"}]
)
def test_variants_survive(tiny, tmp_path, variant):
    network = random_network(tiny, TINY.model_copy(update=variant))
    save_checkpoint(network, tmp_path, tiny, target_model_id="tiny", capacity="tiny")
    loaded = load_repairer(tmp_path, tiny)
    stale = compile_stale(tiny, CHUNKS)
    assert loaded.config == network.config
    assert torch.equal(network.repair(*stale), loaded.repair(*stale))


def test_names_of_the_published_format(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"F32"}
    blocks = {
        f"blocks.{i}.{name}" for i in range(TINY.n_blocks) for name in ("attn.qkv.weight", "attn.proj.weight", "ada")
    }
    both = [f"blocks.{i}.mlp.{layer}" for i in range(TINY.n_blocks) for layer in (0, 2)]
    both += [f"stale_reinject.{i}" for i in range(TINY.n_blocks)]
    both += ["stale_enc.out", "stale_enc.norm", "tok_proj", "fuse", "ln_f", "v_head"]
    rest = {"stale_enc.W", "stale_enc.b", "sigma_stale", "sigma_delta"}
    assert names == blocks | rest | {f"{name}.{kind}" for name in both for kind in ("weight", "bias")}


def test_size_of_the_published_file(tiny, tmp_path):
    """The 3B target's M file on the hub has 119,530,680 bytes."""
    geometry = Geometry(36, 2, 128, 16, 2048, 16, 32768)
    config = RepairConfig(d_b=512, n_blocks=6, n_heads=8, d_seg=16)
    network = RepairNetwork(config, geometry, nn.Embedding(16, 2048))
    save_checkpoint(network, tmp_path, tiny, target_model_id="Qwen/Qwen2.5-3B-Instruct", capacity="M")
    assert (tmp_path / "model.safetensors").stat().st_size == 119_530_680


def as_published(folder: Path, config) -> None:
    """`config.json` with the published keys only: old rotary spelling, keys we do not know, no embedding digest."""
    rope = config.rope_parameters
    edit(
        folder,
        lambda saved: (
            saved.pop("target_embedding_sha256"),
            saved["repair_config"].pop("reinject"),
            saved["repair_config"].update(dropout=0.0, some_future_key=[1]),
            saved["target_config"].update(rope_theta=rope["rope_theta"]),
            saved.update(
                an_unknown_key=1,
                training={"seed": 7, "planned_epochs": 8, "learning_rate": {"peak": 3e-4, "warmup_updates": 2000}},
                target_rope_spec={
                    "kind": rope["rope_type"],
                    "config": {},
                    "frequency_source": "model",
                    "content_sha256": "0" * 64,
                    **{
                        key: saved["target_rope_spec"][key]
                        for key in ("inv_freq_count", "inv_freq_fp32_sha256", "attention_scaling")
                    },
                },
            ),
        ),
    )


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_a_published_config_loads(tmp_path, rope):
    """Files of transformers 4: `rope_scaling` is null, or a dict that may say `type` for `rope_type`."""
    target = tiny_target(tmp_path / rope, rope=rope)
    folder = Path(checkpoint(target, tmp_path / "network"))
    as_published(folder, target.model.config)
    scaling = json.loads((folder / "config.json").read_text())["target_config"]["rope_scaling"]
    assert (scaling is None) == (rope == "default")
    load_repairer(folder, target)
    if scaling:
        edit(folder, lambda c: c["target_config"]["rope_scaling"].update(type=scaling["rope_type"]))
        edit(folder, lambda c: c["target_config"]["rope_scaling"].pop("rope_type"))
        load_repairer(folder, target)


def test_the_frequency_digest_is_plain_float32(tiny, folder):
    """Little-endian float32 base^(-2i/D), hashed; theta 10000, head size 32."""
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 32, 2, dtype=torch.int64).float() / 32)
    want = hashlib.sha256(inv_freq.numpy().astype("<f4").tobytes()).hexdigest()
    assert json.loads((folder / "config.json").read_text())["target_rope_spec"]["inv_freq_fp32_sha256"] == want


def test_an_embedding_table_is_enough(tiny, folder):
    stale = compile_stale(tiny, CHUNKS)
    embedding = nn.Embedding.from_pretrained(tiny.model.get_input_embeddings().weight.clone())
    network = RepairNetwork.load(folder, embedding)
    assert torch.equal(network.repair(*stale), load_repairer(folder, tiny).repair(*stale))
    with pytest.raises(CheckpointError, match=r"config\.json: target_config\.hidden_size is 128, .* 64 wide"):
        RepairNetwork.load(folder, nn.Embedding(512, 64))


def test_half_precision_files(tiny, tmp_path):
    network = random_network(tiny)
    save_checkpoint(network, tmp_path, tiny, target_model_id="tiny", capacity="tiny", dtype=torch.float16)
    loaded = load_repairer(tmp_path, tiny)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.sigma_delta, network.sigma_delta)
    assert (loaded.v_head.weight - network.v_head.weight).abs().max() < 1e-3


def test_a_subfolder(tiny, folder):
    assert load_repairer(folder.parent, tiny, subfolder=folder.name).config == TINY


CONFIG = {
    "other layers": (
        lambda c: c["target_config"].update(n_layers=36),
        r"target_config\.n_layers is 36, the target's is 3",
    ),
    "other heads": (lambda c: c["target_config"].update(n_kv_heads=4), r"n_kv_heads is 4, the target's is 2"),
    "other head size": (lambda c: c["target_config"].update(head_dim=64), r"head_dim is 64, the target's is 32"),
    "other hidden": (lambda c: c["target_config"].update(hidden_size=64), r"hidden_size is 64, the target's is 128"),
    "other query heads": (lambda c: c["target_config"].update(n_attention_heads=8), r"n_attention_heads is 8, .* 4"),
    "other base": (lambda c: c["target_config"].update(rope_theta=1e6), r"rope_theta is 1000000\.0, .* 10000\.0"),
    "other scaling": (
        lambda c: c["target_config"].update(rope_scaling={"type": "linear", "factor": 2.0}),
        r"target_config\.rope_scaling is .*linear.*, the target's is None",
    ),
    "other context": (
        lambda c: c["target_config"].update(max_position_embeddings=99),
        r"max_position_embeddings is 99",
    ),
    "other frequencies": (
        lambda c: c["target_rope_spec"].update(inv_freq_fp32_sha256="ab" * 32),
        r"target_rope_spec\.inv_freq_fp32_sha256 is 'abab",
    ),
    "other amplitude": (lambda c: c["target_rope_spec"].update(attention_scaling=1.1), r"attention_scaling is 1\.1"),
    "layers missing": (lambda c: c["target_config"].pop("n_layers"), r"target_config\.n_layers: Field required"),
    "no target": (lambda c: c.pop("target_config"), r"target_config: Field required"),
    "no network": (lambda c: c.pop("repair_config"), r"repair_config: Field required"),
    "width missing": (lambda c: c["repair_config"].pop("d_b"), r"repair_config\.d_b: Field required"),
    "width zero": (lambda c: c["repair_config"].update(d_b=0), r"repair_config\.d_b: .*greater than 0"),
    "width no number": (lambda c: c["repair_config"].update(d_b="wide"), r"repair_config\.d_b: .*'wide'"),
    "heads do not divide": (lambda c: c["repair_config"].update(n_heads=3), r"repair_config: .*d_b 32.*n_heads 3"),
    "other attention": (lambda c: c.update(repair_attention="sparse"), r"repair_attention: .*'sparse'"),
    "rotated keys": (lambda c: c.update(key_coordinates="global"), r"key_coordinates: .*'global'"),
    "other format": (lambda c: c.update(format="v9"), r"format: .*'v9'"),
    "training no dict": (lambda c: c.update(training=3), r"training: "),
}


@pytest.mark.parametrize("kind", CONFIG)
def test_a_config_that_does_not_fit(tiny, folder, kind):
    change, message = CONFIG[kind]
    edit(folder, change)
    with pytest.raises(CheckpointError, match=r"network/config\.json: .*" + message):
        load_repairer(folder, tiny)


TENSORS = {
    "extra": (lambda t: t.update({"extra.weight": torch.ones(1)}), r"do not belong: extra\.weight"),
    "embedding inside": (lambda t: t.update({"tok_embed.weight": torch.ones(2)}), r"do not belong: tok_embed\.weight"),
    "missing": (lambda t: t.pop("fuse.bias"), r"missing: fuse\.bias"),
    "shape": (lambda t: t.update({"fuse.bias": torch.ones(31)}), r"tensor fuse\.bias is \[31\], want \[32\]"),
    "NaN": (lambda t: t["blocks.1.ada"].__setitem__(3, torch.nan), r"tensor blocks\.1\.ada .*not finite"),
    "infinity": (lambda t: t["stale_enc.W"].__setitem__((0, 0, 0), torch.inf), r"tensor stale_enc\.W .*not finite"),
    "integers": (lambda t: t.update({"fuse.bias": torch.ones(32, dtype=torch.int32)}), r"fuse\.bias is torch\.int32"),
    "sigma zero": (lambda t: t["sigma_delta"].zero_(), r"sigma_delta .*not positive"),
    "fewer blocks": (lambda t: [t.pop(n) for n in list(t) if n.startswith("blocks.3.")], r"missing: blocks\.3\.ada"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_do_not_fit(tiny, folder, kind):
    change, message = TENSORS[kind]
    retensor(folder, change)
    with pytest.raises(CheckpointError, match=r"network/model\.safetensors: .*" + message):
        load_repairer(folder, tiny)


FILES = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json: cannot be read"),
    "no tensors": (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors: cannot be read"),
    "config cut": (lambda f: cut(f / "config.json"), r"config\.json: the file: Invalid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json: the file: "),
    "tensors cut": (lambda f: cut(f / "model.safetensors"), r"model\.safetensors: cannot be read"),
    "tensors empty": (lambda f: (f / "model.safetensors").write_bytes(b""), r"model\.safetensors: cannot be read"),
    "bytes behind": (lambda f: grow(f / "model.safetensors"), r"model\.safetensors: cannot be read"),
    "a pickle": (lambda f: torch.save({}, f / "model.safetensors"), r"model\.safetensors: cannot be read"),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(9))


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files(tiny, folder, kind):
    damage, message = FILES[kind]
    damage(folder)
    with pytest.raises(CheckpointError, match="network/" + message):
        load_repairer(folder, tiny)


def test_weights_of_another_target_with_the_same_shapes(tmp_path, folder):
    """The embedding's digest tells apart what geometry and rotary embedding cannot."""
    other = tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match=r"config\.json: made for another target: target_embedding_sha256 is"):
        load_repairer(folder, other)


def test_a_bfloat16_copy_of_the_target_is_the_same_target(tiny, tmp_path):
    half = copy.copy(tiny)
    half.model = copy.deepcopy(tiny.model).bfloat16()
    folder = checkpoint(half, tmp_path / "network")
    network = load_repairer(folder, tiny)
    assert torch.equal(network.v_head.weight, random_network(tiny).v_head.weight)


@pytest.mark.parametrize("place", ["/no/such/folder", "./none", "plain", "owner/name/sub", "a b/c"])
def test_a_place_where_nothing_is(tiny, place, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=place.rpartition("/")[2]):
        load_repairer(place, tiny)


def test_a_full_disk_leaves_the_old_checkpoint(tiny, folder):
    """The operating system stops the write half way."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before["model.safetensors"]) // 2, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"network/model\.safetensors: cannot be written: .*untouched"):
            save_checkpoint(random_network(tiny, seed=1), folder, tiny, target_model_id="tiny", capacity="tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save_checkpoint(random_network(tiny, seed=1), folder, tiny, target_model_id="tiny", capacity="tiny")
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert {path.name for path in folder.iterdir()} == before.keys()


def test_a_network_that_is_not_finite_is_not_saved(tiny, folder):
    before = (folder / "model.safetensors").read_bytes()
    network = random_network(tiny)
    with torch.no_grad():
        network.fuse.bias[0] = torch.nan
    with pytest.raises(CheckpointError, match=r"tensor fuse\.bias .*not finite"):
        save_checkpoint(network, folder, tiny, target_model_id="tiny", capacity="tiny")
    assert (folder / "model.safetensors").read_bytes() == before


def test_loading_draws_no_random_numbers(tiny, folder):
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    load_network(folder, tiny.model.get_input_embeddings(), tiny)
    assert torch.equal(torch.rand(4), want)


def test_an_embedding_table_of_another_target(tiny, folder):
    table = copy.deepcopy(tiny.model.get_input_embeddings())
    assert torch.equal(RepairNetwork.load(folder, table).v_head.weight, random_network(tiny).v_head.weight)
    with torch.no_grad():
        table.weight[3] += 1
    with pytest.raises(CheckpointError, match=r"config\.json: made for another target: target_embedding_sha256 is"):
        RepairNetwork.load(folder, table)


def test_weights_and_account_of_two_checkpoints(tiny, folder, tmp_path):
    """What a write that was killed between its two files leaves."""
    network = random_network(tiny, seed=1)
    save_checkpoint(network, tmp_path / "other", tiny, target_model_id="tiny", capacity="tiny")
    (tmp_path / "other" / "model.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json: weights_sha256 is \w+, .*model\.safetensors is \w+"):
        load_repairer(folder, tiny)
    edit(folder, lambda config: config.pop("weights_sha256"))  # as in published files
    assert torch.equal(load_repairer(folder, tiny).v_head.weight, network.v_head.weight)


def test_a_key_of_ours_in_somebody_elses_config(tiny, folder):
    edit(folder, lambda config: config["repair_config"].update(attention="exact"))
    assert load_repairer(folder, tiny).config.attention == "block_causal"
