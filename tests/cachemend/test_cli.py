# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: help that teaches, errors that are one clear line, exit codes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cachemend.cli import app
from tests.pipelines.corpora import publish_corpus
from tests.tiny import tiny_model_dir, tiny_settings

COMMANDS = [
    ["models", "fetch"],
    ["ingest"],
    ["delete"],
    ["precompute"],
    ["ask"],
    ["demo"],
    ["answer"],
    ["train"],
    ["evaluate"],
    ["loadtest"],
    ["store", "verify"],
    ["store", "stats"],
]


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.chdir(tmp_path)  # no cachemend.yaml, no models, no data
    monkeypatch.setenv("COLUMNS", "200")
    # `--config` writes this variable: set it through monkeypatch first, so that it is restored afterwards.
    monkeypatch.setenv("CACHEMEND_CONFIG", "")
    monkeypatch.delenv("CACHEMEND_MODELS_DIR", raising=False)
    return CliRunner()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_teaches_by_example(runner: CliRunner, command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"cachemend {' '.join(command)}" in result.output


def test_top_help_shows_the_way_from_documents_to_an_answer(runner: CliRunner) -> None:
    output = runner.invoke(app, ["--help"]).output
    steps = ["models fetch", "ingest docs/", "precompute --corpus", "serve run serve_app:app", "cachemend ask"]
    places = [output.index(step) for step in steps]
    assert places == sorted(places)


def test_help_does_not_load_the_heavy_libraries() -> None:
    code = (
        "import sys, cachemend.cli; print(sorted({'torch', 'ray', 'transformers', 'vllm', 'faiss'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["ingest"], ["ask", "q", "--top-k", "0"], ["--config", "no.yaml", "ask", "q"]]
)
def test_wrong_usage_is_exit_code_2(runner: CliRunner, arguments: list[str]) -> None:
    assert runner.invoke(app, arguments).exit_code == 2


def test_unknown_setting_is_one_line_that_names_the_nearest(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("store:\n  dtyp: float16\n")
    result = runner.invoke(app, ["--config", "bad.yaml", "store", "stats"])
    assert result.exit_code == 1
    assert "store.dtyp" in result.stderr and "'dtype'" in result.stderr
    assert "Traceback" not in result.output


def test_config_reaches_the_settings(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("target:\n  model: no-such-model\n")
    result = runner.invoke(app, ["--config", "mine.yaml", "store", "stats"])
    assert result.exit_code == 1
    assert "'no-such-model'" in result.stderr


def test_missing_model_says_what_to_run(runner: CliRunner) -> None:
    result = runner.invoke(app, ["store", "stats"])
    assert result.exit_code == 1
    assert "cachemend models fetch" in result.stderr
    assert result.stdout == ""


def test_debug_lets_the_exception_through(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--debug", "store", "stats"])
    assert isinstance(result.exception, FileNotFoundError)


def test_ask_without_a_service_says_what_to_run(runner: CliRunner) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        result = runner.invoke(app, ["ask", "why?", "--url", url])
    assert result.exit_code == 1
    assert url in result.stderr and "serve run serve_app:app" in result.stderr


def test_fetch_names_the_models_it_knows(runner: CliRunner) -> None:
    result = runner.invoke(app, ["models", "fetch", "gpt-9"])
    assert result.exit_code == 1
    assert "'gpt-9'" in result.stderr and "smollm2-135m-instruct" in result.stderr


def test_fetch_json_is_all_there_is_on_stdout(runner: CliRunner, tmp_path: Path) -> None:
    for name in ("smollm2-135m-instruct", "all-minilm-l6-v2"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    result = runner.invoke(app, ["models", "fetch", "--json"])
    models = json.loads(result.stdout)["models"]
    assert [(model["name"], model["status"]) for model in models] == [
        ("smollm2-135m-instruct", "present"),
        ("all-minilm-l6-v2", "present"),
    ]


def test_delete_says_what_went_and_what_was_not_there(runner: CliRunner, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_model_dir(tmp_path), root=str(tmp_path / "data"))  # where the command looks
    publish_corpus(settings, "handbook", [(5, 6, 7), (8, 9)])
    result = runner.invoke(app, ["delete", "doc", "typo", "--corpus", "handbook", "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["removed"], report["missing"], report["chunks"]) == (1, ["typo"], 0)
    assert "'typo'" in result.stderr
    assert runner.invoke(app, ["delete", "doc", "--corpus", "nowhere"]).exit_code == 1
