# SPDX-License-Identifier: Apache-2.0
"""`cachemend sensitivity`: the same texts in other chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cachemend.cli import app
from kvcache.target import TargetLLM
from pipelines.evaluation.cuts import Cut
from pipelines.evaluation.requests import read_requests
from tests.pipelines.inputs import write_jsonl
from tests.tiny import tiny_model_dir, tiny_settings

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = (
    "the song was made in the city on the river near the old bridge and its text is kept for the film that comes later"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("sensitivity"))


@pytest.fixture
def songs(tmp_path: Path) -> str:
    path = tmp_path / "songs.jsonl"
    chunks = [{"title": "one", "text": TEXT}, {"text": TEXT[::-1]}, {"text": TEXT.upper()}]
    write_jsonl(path, ({"id": str(i), "question": f"who {i}", "answers": ["yes"], "chunks": chunks} for i in range(2)))
    return str(path)


@pytest.mark.parametrize(
    ("cut", "lengths"),
    [
        (Cut("tokens", 4), [4, 4, 3]),
        (Cut("tokens", 11), [11]),
        (Cut("tokens", 64), [11]),
        (Cut("chunks", 4), [3, 3, 3, 2]),
        (Cut("chunks", 1), [11]),
        (Cut("chunks", 16), [1] * 11),
    ],
)
def test_a_cut_moves_borders_only(cut: Cut, lengths: list[int]) -> None:
    windows = cut.of([range(5), range(5, 6), range(6, 11)])
    assert [len(ids) for ids in windows] == lengths
    assert [token for ids in windows for token in ids] == list(range(11))


def test_a_data_set_for_each_cut(model: str, songs: str, tmp_path: Path) -> None:
    settings = tiny_settings(model, root=str(tmp_path / "root"))
    target = TargetLLM.load(settings=settings)
    limits = (target, settings, 1, 20, 60)
    (plain,) = read_requests([songs], *limits)
    cuts = (Cut("tokens", 16), Cut("chunks", 5))
    found = read_requests([songs], *limits, cuts=cuts)
    assert [data.name for data in found] == ["songs, 16 tokens a chunk", "songs, 5 chunks"]
    text = [token for ids in plain.requests[0].chunks[1:] for token in ids]
    assert len(text) == 60
    for data, count in zip(found, (4, 5), strict=True):
        (request,) = data.requests
        header, *windows = request.chunks
        assert header == plain.requests[0].chunks[0] and len(windows) == count
        assert [token for ids in windows for token in ids] == text
        assert request.question_ids == plain.requests[0].question_ids
        assert data.source == songs and data.digest == plain.digest


@pytest.fixture
def run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"CONFIG": "", "ROOT": str(tmp_path / "root"), "TARGET__MODEL": model}.items():
        monkeypatch.setenv(f"CACHEMEND_{name}", value)
    return lambda *arguments: CliRunner().invoke(app, ["sensitivity", *arguments])


def test_the_command(run, songs: str) -> None:
    arguments = [
        "--methods",
        "epic:window=4,relaxkv",
        "--data",
        songs,
        "--chunk-tokens",
        "64,16",
        "--chunk-counts",
        "2",
    ]
    result = run(*arguments, "--json", "out/found.json", "--chart", "out/chart.png")
    assert result.exit_code == 0, result.output
    assert "songs, by tokens of a chunk" in result.stdout and "songs, by chunks" in result.stdout
    assert Path("out/chart.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(Path("out/found.json").read_text())
    tokens, chunks = found["sweeps"]
    assert (tokens["by"], tokens["values"], chunks["by"], chunks["values"]) == ("tokens", [16, 64], "chunks", [2])
    assert tokens["chunks"][0] > tokens["chunks"][1] > chunks["chunks"][0] == 2
    # The prompts are the same, so full prefill does not move.
    for metric in ("gold_logprob", "f1", "kl_to_full"):
        first, second = tokens["methods"]["full"][metric]
        assert first == pytest.approx(second, abs=1e-4)
    # Four tokens of each chunk are recomputed: the more chunks, the more.
    small, large = tokens["methods"]["epic:window=4"]["recomputed"]
    assert small > 1.5 * large
    assert all(0.1 < share < 1 for share in tokens["methods"]["relaxkv"]["context"])
    assert tokens["methods"]["stale"]["context"] == [0, 0]
    low, high = tokens["methods"]["stale"]["intervals"]["kl_to_full"][0]
    assert low <= tokens["methods"]["stale"]["kl_to_full"][0] <= high
    assert set(found["data_sets"]) == {"songs, 16 tokens a chunk", "songs, 64 tokens a chunk", "songs, 2 chunks"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--chunk-tokens", "64,0"), "whole numbers from 1"),
        (("--chunk-counts", "2,x"), "whole numbers from 1"),
        (("--chunk-tokens", "", "--chunk-counts", ""), "give --chunk-tokens or --chunk-counts"),
    ],
)
def test_sweeps_that_make_no_sense(run, songs: str, arguments: tuple[str, ...], said: str) -> None:
    result = run("--methods", "stale", "--data", songs, *arguments)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())
