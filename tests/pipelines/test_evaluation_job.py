# SPDX-License-Identifier: Apache-2.0
"""`cachemend evaluate` from data to tables: what it keeps, what it measures again, what it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cachemend.cli import app
from kvcache.chunk import ChunkKV
from kvcache.prompt import plain_ids
from kvcache.settings import Settings
from kvcache.store import ChunkStore
from kvcache.target import TargetLLM
from pipelines.evaluate import Evaluation, EvaluationJob
from pipelines.evaluation.measure import Meter
from pipelines.evaluation.requests import EvaluationError, read_requests
from pipelines.evaluation.stale import StaleSource
from repair.base import MethodParamsError
from repair.spec import parse_methods
from tests.repair.methods import checkpoint
from tests.tiny import tiny_model_dir, tiny_settings

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = (
    "the song was made in the city on the river near the old bridge",
    "the film of the question comes later and its text is read once",
    "who wrote the chunk that is kept for the cache of the city",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="module")
def network(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(TargetLLM.load(settings=tiny_settings(model)), tmp_path_factory.mktemp("network") / "tiny")


@pytest.fixture
def settings(model: str, network: str, tmp_path: Path) -> Settings:
    return tiny_settings(model, root=str(tmp_path / "root"), repair={"cacherepair": network})


def data_file(folder: Path, name: str, rows: int) -> str:
    path = folder / f"{name}.jsonl"
    lines = [
        {
            "id": f"{name}{index}",
            "question": f"who wrote the {name} {index}",
            "answers": ["yes", "the old bridge"],
            "chunks": [{"title": f"{name} {index}", "text": text} for text in TEXTS],
        }
        for index in range(rows)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


@pytest.fixture
def song(tmp_path: Path) -> str:
    return data_file(tmp_path, "song", 3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is really measured: (row, method and parameters)."""
    seen: list[tuple[str, str]] = []
    measure = Meter.measure

    def spy(self: Meter, request: Any, reference: Any, repairer: Any, params: Any, stale: Any) -> dict[str, Any]:
        seen.append((request.id, repairer.name + "".join(f":{key}={params[key]}" for key in params)))
        return measure(self, request, reference, repairer, params, stale)

    monkeypatch.setattr(Meter, "measure", spy)
    return seen


def evaluate(methods: str, data: Sequence[str], settings: Settings, tmp_path: Path, **options: Any) -> dict[str, Any]:
    job = EvaluationJob(parse_methods(methods), data, work=tmp_path / "work", **options)
    return Evaluation(job, settings, lambda *_: None).run()


def test_only_what_is_missing_is_measured(settings, song, measured, tmp_path: Path) -> None:
    first = evaluate("cacherepair", [song], settings, tmp_path, limit=2)
    assert len(measured) == 2 * 3
    measured.clear()
    again = evaluate("cacherepair", [song], settings, tmp_path, limit=2)
    assert measured == []
    for part in ("methods", "intervals", "half_budget"):
        assert again[part] == first[part]
    assert (first["config"]["sessions"], again["config"]["sessions"]) == (1, 1)
    more = evaluate("cacherepair,cacherepair:parts=v", [song], settings, tmp_path, limit=3)
    assert more["config"]["sessions"] == 2
    assert measured == [
        ("song0", "cacherepair:parts=v"),
        ("song1", "cacherepair:parts=v"),
        *(("song2", name) for name in ("full", "stale", "cacherepair", "cacherepair:parts=v")),
    ]
    assert list(more["methods"]) == ["full", "stale", "cacherepair", "cacherepair:parts=v"]


def test_a_killed_run_goes_on(settings, song, measured, tmp_path: Path) -> None:
    evaluate("stale", [song], settings, tmp_path)
    measured.clear()
    (file,) = (tmp_path / "work").glob("*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:50])  # in the middle of the second question's stale row
    evaluate("stale", [song], settings, tmp_path)
    assert measured == [("song1", "stale"), ("song2", "full"), ("song2", "stale")]
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_another_network_is_measured_anew(settings, song, measured, network, model, tmp_path: Path) -> None:
    evaluate(f"cacherepair@{network}", [song], settings, tmp_path, limit=1)
    measured.clear()
    copy = shutil.copytree(network, tmp_path / "copy")
    evaluate(f"cacherepair@{network},cacherepair@{copy}", [song], settings, tmp_path, limit=1)
    assert measured == [("song0", "cacherepair")]  # the copy goes by another name
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 0x01  # the last float's sign or exponent stays
    weights[-2] ^= 0x01
    (copy / "model.safetensors").write_bytes(weights)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "weights_sha256": hashlib.sha256(weights).hexdigest()}))
    measured.clear()
    evaluate(f"cacherepair@{network},cacherepair@{copy}", [song], settings, tmp_path, limit=1)
    assert measured == [("song0", "cacherepair")]


def test_questions_without_chunks_are_given_articles(settings, model, tmp_path: Path) -> None:
    """The best pieces, in windows of equal length: the ids of the windows are those of the pieces, in order."""
    (tmp_path / "articles.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in TEXTS))
    path = tmp_path / "news.jsonl"
    path.write_text(json.dumps({"id": "n", "question": "which song of the river", "answers": ["yes"]}) + "\n")
    target = TargetLLM.load(settings=settings)
    limits = (target, settings, 0, 4, 4096)
    with pytest.raises(EvaluationError, match="'n' has no chunks of its own; --articles"):
        read_requests([str(path)], *limits)
    (data,) = read_requests([str(path)], *limits, str(tmp_path / "articles.jsonl"))
    _, *windows = data.requests[0].chunks
    best = [plain_ids(target.tokenizer, TEXTS[index]) for index in (0, 1, 2)]
    assert sorted(token for window in windows for token in window) == sorted(token for ids in best for token in ids)
    assert len(windows) == 4 and max(map(len, windows)) - min(map(len, windows)) <= 1
    assert [token for window in windows for token in window][: len(best[0])] == best[0]  # the song comes first
    (tmp_path / "articles.jsonl").write_text(json.dumps({"text": "nothing alike"}) + "\n")
    with pytest.raises(EvaluationError, match=r"'n'.*no article"):
        read_requests([str(path)], *limits, str(tmp_path / "articles.jsonl"))


def test_bounds_of_another_operator_are_measured_anew(settings, song, measured, tmp_path: Path) -> None:
    """A default above the bound is lowered: the same label means other work."""
    selective = settings.repair.selective.model_copy(update={"max_ratio": 0.05})
    repair = settings.repair.model_copy(update={"selective": selective})
    bounded = evaluate("cacheblend", [song], settings.model_copy(update={"repair": repair}), tmp_path, limit=1)
    measured.clear()
    free = evaluate("cacheblend", [song], settings, tmp_path, limit=1)
    assert ("song0", "cacheblend") in measured
    assert free["methods"]["cacheblend"]["macs"] > bounded["methods"]["cacheblend"]["macs"]


def test_without_a_network_stale_is_one_unit_away(settings, song, tmp_path: Path) -> None:
    """Units are measured over the evaluated requests: over all their tokens, stale's error is one unit."""
    found = evaluate("stale", [song], settings, tmp_path, limit=1)
    assert found["config"]["units"] == "requests"
    assert found["methods"]["stale"]["kv_mse_normalized"] == pytest.approx(1.0, rel=1e-4)
    assert found["methods"]["full"]["kv_mse_normalized"] == 0


def test_a_table_per_data_set_and_one_of_all(settings, tmp_path: Path) -> None:
    data = [data_file(tmp_path, "song", 1), data_file(tmp_path, "film", 2)]
    found = evaluate("stale", data, settings, tmp_path)
    assert {name: each["requests"] for name, each in found["data_sets"].items()} == {"song": 1, "film": 2}
    assert found["requests"] == 3
    song, film = (found["data_sets"][name]["methods"]["stale"]["kl_to_full"] for name in ("song", "film"))
    assert found["methods"]["stale"]["kl_to_full"] == pytest.approx((song + 2 * film) / 3)


def test_stale_kv_comes_from_the_store(settings, tmp_path: Path) -> None:
    target, store = TargetLLM.load(settings=settings), ChunkStore.of(settings)
    stored, missing = tuple(range(10, 20)), tuple(range(20, 35))
    marked = ChunkKV(stored, *(torch.full(target.geometry.kv_shape(10), 7.0) for _ in "kv"))
    store.put(marked)
    with StaleSource(target, settings).chunks([stored, missing, stored]) as (first, second, third):
        assert first.k.eq(7).all() and third.v.eq(7).all()
        (want,) = target.stale_kv([missing])
        assert torch.equal(second.k, want.k) and torch.equal(second.v, want.v)
    assert list(store.keys()) == [store.format.key(stored)]


def test_a_glued_header_moves_a_chunk_boundary_and_nothing_else(settings, song, tmp_path: Path) -> None:
    target = TargetLLM.load(settings=settings)
    (served,), (glued,) = (
        read_requests([song], target, settings, 0, 4, 4096, glue_header=glue) for glue in (False, True)
    )
    for own, other in zip(served.requests, glued.requests, strict=True):
        header, first, *rest = own.chunks
        assert other.chunks == ((*header, *first), *rest) and other.question_ids == own.question_ids
    found, apart = (evaluate("stale", [song], settings, tmp_path, glue_header=glue) for glue in (True, False))
    assert found["methods"]["full"]["gold_logprob"] == apart["methods"]["full"]["gold_logprob"]
    assert found["methods"]["stale"]["kl_to_full"] != apart["methods"]["stale"]["kl_to_full"]
    assert found["config"]["data"]["song"]["chunks"] == apart["config"]["data"]["song"]["chunks"] == len(TEXTS)
    assert found["config"]["limits"]["glue_header"] and not apart["config"]["limits"]["glue_header"]


def test_chunks_are_capped(settings, song) -> None:
    target = TargetLLM.load(settings=settings)
    (data,) = read_requests([song], target, settings, limit=1, max_chunks=2, max_tokens=11)
    assert data.requests[0].lengths[1:] == (5, 5)
    assert len(data.requests) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunks": None}, "row 'x' has no chunks of its own"),
        ({"question": "the " * 3000}, "row 'x' needs .* positions, the target has 2048; lower --max-tokens"),
    ],
)
def test_rows_that_cannot_be_evaluated(settings, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    row = {"id": "x", "question": "who", "answers": ["yes"], "chunks": [{"text": "the song"}]}
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({key: value for key, value in {**row, **change}.items() if value is not None}))
    with pytest.raises(EvaluationError, match=said):
        evaluate("stale", [str(path)], settings, tmp_path)


def test_two_data_sets_of_one_name(settings, song, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(EvaluationError, match="'song'; rename one"):
        evaluate("stale", [song, data_file(tmp_path / "other", "song", 1)], settings, tmp_path)


def test_parameters_are_checked_before_anything_is_read(settings, tmp_path: Path) -> None:
    with pytest.raises(MethodParamsError, match="parts must be one of kv, k, v, got 'x'"):
        evaluate("cacherepair:parts=x", ["no-such-file.jsonl"], settings, tmp_path)


def test_the_command(model, network, song, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "CONFIG": "",
        "ROOT": str(tmp_path / "root"),
        "TARGET__MODEL": model,
        "REPAIR__CACHEREPAIR": network,
    }.items():
        monkeypatch.setenv(f"CACHEMEND_{name}", value)
    arguments = ["--methods", "full,stale,cacherepair", "--data", song, "--limit", "2"]
    result = CliRunner().invoke(app, ["evaluate", *arguments, "--json", "out/found.json", "--chart", "out/chart.png"])
    assert result.exit_code == 0, result.output
    assert "6 of 6 measurements to make" in result.stderr
    assert "song: 2 questions" in result.stdout and "cacherepair" in result.stdout
    found = json.loads(Path("out/found.json").read_text())
    assert {"methods", "intervals", "config", "data_sets", "half_budget", "requests"} == found.keys()
    assert list(found["methods"]) == ["full", "stale", "cacherepair"]
    for one in found["methods"].values():
        for key in ("f1", "em", "gold_logprob", "kl_to_full", "kv_mse_normalized", "macs"):
            assert isinstance(one[key], float), key
        assert 0 < one["ttft_ms"]["p50"] <= one["ttft_ms"]["p90"]
    config = found["config"]
    assert config["units"] == "checkpoint"
    assert config["data"]["song"]["requests"] == 2 and len(config["data"]["song"]["sha256"]) == 64
    limits = {"limit": 2, "max_chunks": 20, "max_tokens": 4096, "articles": None, "glue_header": False}
    assert config["limits"] == {**limits, "answer_tokens": 32}
    assert config["bootstrap"] == {"draws": 10_000, "seed": 7, "percentiles": [2.5, 97.5]}
    assert found["methods"]["cacherepair"]["memory"]["parameter_bytes"] > 0
    for chart in ("out/chart.png", "out/chart-kv-error.png"):
        assert Path(chart).read_bytes().startswith(b"\x89PNG")
