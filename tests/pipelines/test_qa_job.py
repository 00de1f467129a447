# SPDX-License-Identifier: Apache-2.0
"""The batch job on a real engine with a tiny target: one run, started half done, that everything is checked on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch

from kvcache.chunk import chunk_key
from kvcache.compile import compile_stale, materialize, to_hf_cache
from kvcache.prompt import PromptTemplate, plain_ids
from kvcache.settings import Settings
from kvcache.store import ChunkStore
from kvcache.target import TargetLLM
from pipelines.ingest import ingest
from pipelines.qa import job
from pipelines.qa.contexts import own_prompts, retrieved_prompts
from pipelines.qa.dataset import DatasetError, read_dataset
from pipelines.qa.metrics import exact_match, f1
from pipelines.qa.results import OutputError, Results
from repair.base import MethodParamsError
from repair.registry import UnknownMethodError
from retrieval.errors import UnknownCorpusError
from retrieval.retriever import Retriever
from tests.pipelines.inputs import write_jsonl
from tests.processes import assert_gone, watched_actors
from tests.retrieval.fakes import HashingEmbedder
from tests.tiny import tiny_model_dir, tiny_settings

METHODS = "full,stale"
LABELS = METHODS.split(",")
MAX_TOKENS = 6
TOLERANCE = 2e-3
TEXTS = ["the song of the river", "who wrote the song", "a film made near the old bridge", "one two yes no"]
RECORDS = [
    {
        "id": f"q{number}",
        "question": f"when was the {thing} made?",
        "answers": [f"the {thing}", "no"],
        "chunks": [{"title": f"{thing} {i}", "text": text} for i, text in enumerate(TEXTS[: 2 + number])],
    }
    for number, thing in enumerate(("song", "film", "bridge"))
]
KEPT = {
    **{"id": "q1", "method": "stale", "params": {}, "question": "kept", "answer": "kept", "answer_token_ids": [5]},
    **{"golds": ["kept"], "f1": 0.25, "em": 0.0, "gold": "kept", "gold_logprob_mean": -1.0, "gold_logprob_sum": -2.0},
    **{"ttft_s": 0.5, "stages": {"fetch": 0.125}, "prompt_tokens": 9, "cached_tokens": 7, "chunk_ids": ["k"]},
    **{"computed_chunks": 0, "fallback": "kept"},
}
"""A row as an earlier start would have left it, with values that no computation gives."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answer")


@pytest.fixture(scope="module")
def settings(folder: Path) -> Settings:
    # The deadline of a service must not count here: every chunk is computed on the spot.
    return tiny_settings(tiny_model_dir(folder), store={"deadline_s": 1e-3}, engine={"threads": 2, "block_size": 32})


@pytest.fixture(scope="module")
def target(settings: Settings) -> TargetLLM:
    return TargetLLM.load(settings=settings)


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Path:
    write_jsonl(folder / "qa.jsonl", RECORDS)
    return folder / "qa.jsonl"


@pytest.fixture(scope="module")
def output(folder: Path) -> Path:
    return folder / "answers.jsonl"


@pytest.fixture(scope="module")
def run(
    ray_alone: Any, dataset: Path, output: Path, settings: Settings
) -> tuple[job.AnswerPlan, job.AnswerReport, list, set[psutil.Process]]:
    before = job.plan(dataset, METHODS, output, settings, max_tokens=MAX_TOKENS, concurrency=2)
    assert (before.questions, before.requests, before.missing) == (3, 6, 6)
    before._work.results.begin()
    before._work.results.add([KEPT])
    plan = job.plan(dataset, METHODS, output, settings, max_tokens=MAX_TOKENS, concurrency=2)
    told: list[tuple[str, int, int | None]] = []
    with watched_actors() as seen:
        report = job.answer(plan, settings, lambda *what: told.append(what))
    return plan, report, told, seen


@pytest.fixture(scope="module")
def rows(run: Any, output: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["id"], row["method"]) for row in found] == [(f"q{i}", name) for i in range(3) for name in LABELS]
    return {(row["id"], row["method"]): row for row in found}


def test_only_what_is_missing_is_computed(run: Any, rows: Any, output: Path) -> None:
    plan, report, told, _ = run
    assert (plan.missing, report.computed, report.requests) == (5, 5, 6)
    assert plan.seconds_estimate > 0
    assert told[0] == ("answer", 1, 6) and told[-1] == ("answer", 6, 6)
    assert rows["q1", "stale"] == KEPT
    assert not Path(f"{output}.parts").exists()


@pytest.mark.parametrize("row_id", ["q0", "q1", "q2"])
def test_full_is_the_targets_own_greedy_answer(rows: Any, prompts: Any, target: TargetLLM, row_id: str) -> None:
    chunks, question, golds = prompts[row_id]
    ids = torch.tensor([[*(token for chunk in chunks for token in chunk), *question]])
    want = target.model.generate(ids, do_sample=False, max_new_tokens=MAX_TOKENS)[0, ids.shape[1] :].tolist()
    row = rows[row_id, "full"]
    assert row["answer_token_ids"] == want
    # vLLM holds back a last character that is not whole, transformers shows a replacement character.
    assert row["answer"].rstrip("\ufffd") == target.tokenizer.decode(want, skip_special_tokens=True).rstrip("\ufffd")
    assert (row["prompt_tokens"], row["cached_tokens"], row["fallback"]) == (ids.shape[1], 0, None)
    assert (row["f1"], row["em"]) == (f1(row["answer"], row["golds"]), exact_match(row["answer"], row["golds"]))
    _check_gold(row, golds, lambda gold: _logprobs(target, [*ids[0].tolist()], gold, None))


@pytest.mark.parametrize("row_id", ["q0", "q2"])
def test_stale_is_scored_on_what_the_engine_was_given(rows: Any, prompts: Any, target: TargetLLM, row_id: str) -> None:
    chunks, question, golds = prompts[row_id]
    row = rows[row_id, "stale"]

    def score(gold: list[int]) -> list[float]:
        stale, _, _ = compile_stale(target, chunks)
        return _logprobs(target, list(question), gold, to_hf_cache(materialize(stale, target.rotary)))

    _check_gold(row, golds, score)
    assert abs(row["gold_logprob_sum"] - rows[row_id, "full"]["gold_logprob_sum"]) > 10 * TOLERANCE
    assert (row["cached_tokens"], row["fallback"]) == (sum(map(len, chunks)), None)
    assert {"fetch", "repair", "rotary", "handoff", "first_token", "inject"} <= row["stages"].keys()
    assert row["ttft_s"] >= row["stages"]["first_token"] > 0
    assert row["ttft_s"] < row["stages"]["first_token"] + 60  # no deadline, no lease was waited for


def test_chunks_are_computed_once_and_stored(rows: Any, prompts: Any, target: TargetLLM, settings: Settings) -> None:
    store = ChunkStore.of(settings)
    for row_id in ("q0", "q2"):
        chunks, _, _ = prompts[row_id]
        assert rows[row_id, "stale"]["chunk_ids"] == [chunk_key(target.fingerprint, ids) for ids in chunks]
        assert all(map(store.contains, chunks))
        assert rows[row_id, "stale"]["computed_chunks"] > 0
        assert rows[row_id, "full"]["computed_chunks"] == 0


def test_the_summary_is_that_of_the_rows(run: Any, rows: Any) -> None:
    for name, summary in run[1].methods.items():
        mine = [row for (_, method), row in rows.items() if method == name]
        assert summary.n == 3
        assert summary.f1 == pytest.approx(sum(row["f1"] for row in mine) / 3)
        assert summary.gold_logprob == pytest.approx(sum(row["gold_logprob_mean"] for row in mine) / 3)
        times = sorted(row["ttft_s"] for row in mine)
        assert summary.ttft_p50_s == pytest.approx(times[1])
        assert summary.ttft_p90_s == pytest.approx(times[1] + 0.8 * (times[2] - times[1]))
        assert summary.fallbacks == (1 if name == "stale" else 0)  # the kept row's


def test_started_again_it_has_nothing_to_do(run: Any, output: Path, dataset: Path, settings: Settings) -> None:
    before, begin = output.read_bytes(), time.monotonic()
    plan = job.plan(dataset, METHODS, output, settings, max_tokens=MAX_TOKENS, concurrency=2)
    report = job.answer(plan, settings)
    assert (plan.missing, plan.seconds_estimate, report.computed, report.methods) == (0, 0.0, 0, run[1].methods)
    assert output.read_bytes() == before
    assert time.monotonic() - begin < 10  # no engine was started


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 7}, "max_tokens: 6 there, 7 now"),
        ({"limit": 2}, "dataset.digest: .* dataset.questions: 3 there, 2 now"),
        ({"methods": "full"}, r"methods: \['full', 'stale'\] there, \['full'\] now"),
        ({"instruction": "Be brief."}, r"settings\.prompt\.instruction: 'Answer with .* there, 'Be brief\.' now"),
    ],
)
def test_another_configuration_is_refused(
    run: Any, output: Path, dataset: Path, settings: Settings, change: dict[str, Any], message: str
) -> None:
    before = output.read_bytes()
    given = {"methods": METHODS, "max_tokens": MAX_TOKENS, "concurrency": 2, **change}
    if instruction := given.pop("instruction", None):
        prompt = settings.prompt.model_copy(update={"instruction": instruction})
        settings = settings.model_copy(update={"prompt": prompt})
    with pytest.raises(OutputError, match=message):
        job.plan(dataset, given.pop("methods"), output, settings, **given)
    assert output.read_bytes() == before


def test_the_run_file_says_what_the_rows_are_of(run: Any, output: Path, target: TargetLLM) -> None:
    said = json.loads(Path(f"{output}.run.json").read_text())
    assert said["target_fingerprint"] == target.fingerprint
    assert said["methods"] == LABELS
    assert said["versions"]["vllm"] and said["versions"]["torch"] == torch.__version__
    assert said["settings"]["engine"]["block_size"] == 32


def test_no_engine_is_left_behind(run: Any) -> None:
    *_, seen = run
    assert seen
    assert_gone(seen, 30)


def test_parquet_holds_the_same_rows(rows: Any, folder: Path) -> None:
    path, order = folder / "rows.parquet", list(rows)
    results = Results(str(path))
    results.open({"a": 1})
    results.begin()
    results.add(list(rows.values()))
    assert results.finish(order) == list(rows.values())
    table = pq.read_table(path).to_pylist()
    back = [{**row, "params": json.loads(row["params"]), "stages": dict(row["stages"])} for row in table]
    assert back == list(rows.values())
    again = Results(str(path))
    again.open({"a": 1})
    assert all(again.done(*key) for key in order) and again.finish(order) == back
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OutputError, match=r"rows\.parquet is damaged"):
        Results(str(path)).open({"a": 1})
    Path(f"{path}.run.json").unlink()
    with pytest.raises(OutputError, match=r"rows\.parquet exists without rows\.parquet\.run\.json"):
        Results(str(path)).open({"a": 1})


def test_what_cannot_be_done_is_said_before_an_engine_starts(
    ray_alone: Any, dataset: Path, folder: Path, settings: Settings
) -> None:
    output = folder / "never.jsonl"
    with pytest.raises(UnknownMethodError, match=r"unknown method 'stael'; available: .*stale"):
        job.plan(dataset, "stael", output, settings)
    with pytest.raises(MethodParamsError, match="takes no method_params"):
        job.plan(dataset, "stale:ratio=1", output, settings)
    with pytest.raises(job.AnswerError, match="'full' has no checkpoint, so @there means nothing"):
        job.plan(dataset, "full@there", output, settings)
    with pytest.raises(job.AnswerError, match="'cacherepair' is named with two checkpoints"):
        job.plan(dataset, "cacherepair@here,cacherepair@there", output, settings)
    with pytest.raises(OutputError, match="must end in"):
        job.plan(dataset, "stale", folder / "never.csv", settings)
    with pytest.raises(job.AnswerError, match=r"row 'q2': \d+ prompt tokens and 480 new ones are more than .* 512"):
        job.plan(dataset, "stale", output, settings, max_tokens=480)
    write_jsonl(folder / "bare.jsonl", [{"id": "b", "question": "q", "answers": ["a"]}])
    with pytest.raises(DatasetError, match="row 'b' has no chunks of its own: name a corpus"):
        job.plan(folder / "bare.jsonl", "stale", output, settings)
    assert not list(folder.glob("never*"))


def test_chunks_from_a_corpus_are_the_retrievers(
    ray_alone: Any, dataset: Path, folder: Path, settings: Settings
) -> None:
    write_jsonl(folder / "passages.jsonl", [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)])
    ingest([str(folder / "passages.jsonl")], "passages", settings, lambda *_: None, embedder=HashingEmbedder)
    rows = read_dataset(dataset)
    prompts, generation = retrieved_prompts(rows, "passages", 2, settings, HashingEmbedder)
    retriever = Retriever(settings, HashingEmbedder())
    found = retriever.query("passages", [row.question for row in rows], 2)
    retriever.close()
    assert generation == found.generation
    assert [prompt.chunks[1:] for prompt in prompts] == [tuple(c.token_ids for c in hits) for hits in found.hits]
    own = own_prompts(rows, settings)
    assert [(p.row, p.chunks[0], p.question_ids) for p in prompts] == [
        (p.row, p.chunks[0], p.question_ids) for p in own
    ]
    with pytest.raises(UnknownCorpusError, match="unknown corpus 'nowhere'; known: 'passages'"):
        retrieved_prompts(rows, "nowhere", 2, settings, HashingEmbedder)


@pytest.fixture(scope="module")
def prompts(target: TargetLLM, settings: Settings) -> dict[str, tuple[list[list[int]], tuple[int, ...], dict]]:
    """Chunks, question and gold answers of each row, as token ids."""
    template = PromptTemplate(target.tokenizer, settings.prompt)
    result = {}
    for record in RECORDS:
        chunks = [list(template.header_ids())]
        chunks += [plain_ids(target.tokenizer, f"{chunk['title']}\n{chunk['text']}") for chunk in record["chunks"]]
        question = template.question_ids([{"role": "user", "content": record["question"]}])
        golds = {gold: plain_ids(target.tokenizer, f" {gold}") for gold in record["answers"]}
        result[record["id"]] = (chunks, question, golds)
    return result


@torch.inference_mode()
def _logprobs(target: TargetLLM, prompt: list[int], gold: list[int], cache: Any) -> list[float]:
    """Log-probability of each gold token, from one pass over prompt and answer."""
    logits = target.model(torch.tensor([[*prompt, *gold]]), past_key_values=cache).logits[0].log_softmax(-1)
    return [logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(gold)]


def _check_gold(row: dict[str, Any], golds: dict[str, list[int]], score: Any) -> None:
    scores = {gold: score(ids) for gold, ids in golds.items()}
    best = max(scores, key=lambda gold: sum(scores[gold]) / len(scores[gold]))
    assert row["gold"] == best
    assert row["gold_logprob_sum"] == pytest.approx(sum(scores[best]), abs=TOLERANCE)
    assert row["gold_logprob_mean"] == pytest.approx(sum(scores[best]) / len(scores[best]), abs=TOLERANCE)
