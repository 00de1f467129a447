# SPDX-License-Identifier: Apache-2.0
"""The whole chain on real parts: real small LLM, real vLLM, real FAISS, real Ray, over HTTP."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from cachemend import demo
from cachemend.service import running_service
from kvcache.chunk import chunk_key
from kvcache.settings import Settings, load_settings
from kvcache.target import TargetLLM
from repair.registry import offered
from retrieval.corpus import Corpus
from tests.engine.prompts import stale_reference
from tests.processes import assert_gone, family_of, title

pytestmark = pytest.mark.real
QUESTION = " Question: What is this about? Answer:"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHEMEND_ROOT", str(tmp_path_factory.mktemp("data")))
        patch.setenv("CACHEMEND_SERVE__LOG_ENCODING", "JSON")
        yield load_settings()


@pytest.fixture(scope="module")
def client(settings: Settings) -> Iterator[openai.OpenAI]:
    demo.prepare_corpus(settings)
    with running_service("serve_app:build_app", lambda _: None) as service:
        family = family_of()[1:]
        yield openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120)
    assert_gone(family, 0)


@pytest.fixture(scope="module")
def chunks(client: openai.OpenAI, settings: Settings) -> dict[str, list[int]]:
    """Token ids of the corpus's chunks by id."""
    table = Corpus.open(settings.corpora_uri, demo.CORPUS).table
    return dict(zip(table["chunk_id"].to_pylist(), table["token_ids"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def target(settings: Settings) -> TargetLLM:
    return TargetLLM.load(settings=settings)


def chat(client: openai.OpenAI, question: str, method: str, **rag):
    return client.chat.completions.create(
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": question}],
        max_tokens=12,
        temperature=0,
        extra_body={"rag": {"corpus": demo.CORPUS, "method": method, **rag}},
    )


def complete(client: openai.OpenAI, method: str, chunk_ids: list[str], tokens: int = 4):
    return client.completions.create(
        model="smollm2-135m-instruct",
        prompt=QUESTION,
        max_tokens=tokens,
        temperature=0,
        logprobs=1,
        extra_body={"rag": {"corpus": demo.CORPUS, "method": method, "chunk_ids": chunk_ids}},
    )


def test_damaged_chunks_are_made_good(client, chunks, target, settings):
    """The first test, so that the chunks are not in memory yet: one removed, one with a byte flipped, two swapped."""
    ids = list(chunks)[-4:]
    paths = [_path(settings, target, chunks[i]) for i in ids]
    flipped = bytearray(paths[1].read_bytes())
    flipped[-5] ^= 0x10
    swapped = paths[2].read_bytes(), paths[3].read_bytes()
    paths[0].unlink()
    paths[1].write_bytes(flipped)
    paths[3].write_bytes(swapped[0])
    paths[2].write_bytes(swapped[1])
    got = complete(client, "stale", ids)
    assert sum(got.rag["chunk_misses"].values()) == 4
    assert got.rag["chunk_misses"]["absent"] == 1 and got.rag["chunk_misses"]["corrupt"] >= 1
    question = target.tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    want = stale_reference(target, [chunks[i] for i in ids], question)
    assert got.choices[0].logprobs.token_logprobs == pytest.approx(want, abs=1e-3)
    again = complete(client, "stale", ids)
    assert again.rag["chunk_misses"] == {} and again.choices[0].text == got.choices[0].text
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not paths[0].exists():
        time.sleep(0.2)
    assert paths[0].exists(), "the computed chunk was not stored again"


def test_questions_find_their_passages(client, settings):
    found = 0
    questions = demo.read_questions()
    for question in questions[:8]:
        for method in offered(settings):
            answer = chat(client, question.question, method, top_k=5)
            assert answer.rag["method"] == method and answer.rag.get("fallback") is None
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert (cached > 0.8 * answer.usage.prompt_tokens) if method != "full" else cached == 0
        found += any(citation["document_id"] in question.passage_ids for citation in answer.rag["citations"])
    assert found >= 7


def test_one_chunk_reused_is_full_prefill(client, chunks):
    """A plain completion has no header chunk, so the chunk stands at position 0."""
    chunk = next(iter(chunks))
    full, stale = complete(client, "full", [chunk]), complete(client, "stale", [chunk])
    assert stale.usage.prompt_tokens_details.cached_tokens == len(chunks[chunk])
    assert stale.choices[0].text == full.choices[0].text
    assert stale.choices[0].logprobs.token_logprobs == pytest.approx(full.choices[0].logprobs.token_logprobs, abs=1e-3)


def test_stale_through_http_is_what_transformers_computes(client, chunks, target):
    ids = list(chunks)[10:13]
    got = complete(client, "stale", ids)
    question = target.tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    want = stale_reference(target, [chunks[i] for i in ids], question)
    assert got.choices[0].logprobs.token_logprobs == pytest.approx(want, abs=1e-3)


def _path(settings: Settings, target: TargetLLM, ids: list[int]) -> Path:
    (path,) = Path(settings.store_uri).rglob(f"{chunk_key(target.fingerprint, ids)}*")
    return path


def test_a_request_can_be_followed_through_the_logs(client, chunks):
    """From the client's X-Request-ID in HTTP to the engine, a line of JSON each."""
    named = client.with_options(default_headers={"X-Request-ID": "followed"})
    answer = complete(named, "stale", list(chunks)[:2])
    lines = {}
    deadline = time.monotonic() + 20
    while len(lines) < 3 and time.monotonic() < deadline:
        for log in Path(_session(), "logs/serve").glob("replica_*.log"):
            for line in map(json.loads, log.read_text().splitlines()):
                if line.get("answer_id") == answer.id:
                    lines[line["event"]] = line
    assert {event: line["deployment"] for event, line in lines.items()} == {
        "answered": "cachemend_Ingress",
        "mended": "cachemend_Repairer",
        "generated": "cachemend_Engine",
    }
    assert {line["request_id"] for line in lines.values()} == {"followed"}
    assert {line.get("status") for line in lines.values()} == {200, None}
    assert lines["mended"]["rows"] == lines["generated"]["cached_tokens"] > 0
    assert "inject" in lines["generated"]["stages_ms"] and "fetch" in lines["mended"]["stages_ms"]


def _session() -> str:
    """Folder of the Ray session that the service runs in."""
    raylets = [process for process in family_of() if "raylet" in title(process)]
    return re.search(r"(/[^\s=]+/session_[\w-]+)/", title(raylets[0])).group(1)


def test_what_the_replicas_themselves_measure_is_scraped(client):
    """The first two gauges are told at health checks alone. After the chunks of the first test have been damaged."""
    wanted = (
        "ray_rag_repair_queue{",
        "ray_rag_index_generation{",
        f'corpus="{demo.CORPUS}"',
        "ray_rag_requests_in_flight{",
        "ray_rag_checksum_failures_total{",
    )
    base, text, deadline = str(client.base_url).removesuffix("/v1/"), "", time.monotonic() + 60
    while time.monotonic() < deadline and not all(word in text for word in wanted):
        time.sleep(1)
        text = httpx.get(f"{base}/metrics", timeout=20).text
    assert [word for word in wanted if word not in text] == []
    (failures,) = re.findall(r"^ray_rag_checksum_failures_total{.*} (\S+)$", text, re.MULTILINE)
    assert float(failures) == 3  # of `test_damaged_chunks_are_made_good`: a byte flipped, two swapped


def test_methods_share_a_batch(client):
    questions = [question.question for question in demo.read_questions()[:4]]
    calls = [(question, method) for question in questions for method in ("full", "stale")]
    alone = [chat(client, *call).choices[0].message.content for call in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        together = [a.choices[0].message.content for a in pool.map(lambda call: chat(client, *call), calls)]
    # Batches round differently; a near tie may fall the other way, a mixed-up cache would change most of them.
    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= len(calls) - 1


def test_clients_that_leave_stop_their_work(client):
    url = str(client.base_url)
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "Tell me everything."}],
        "stream": True,
        "max_tokens": 1000,
        "rag": {"corpus": demo.CORPUS, "method": "stale"},
    }

    def leave(_: int) -> None:
        with httpx.stream("POST", f"{url}chat/completions", json=body, timeout=60) as response:
            next(response.iter_raw())

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(leave, range(6)))
    began = time.monotonic()
    chat(client, demo.read_questions()[0].question, "stale")
    # Six streams of 1,000 tokens would keep the engine busy for minutes.
    assert time.monotonic() - began < 30


def test_forged_transfer_parameters_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
        client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "Hi?"}],
            extra_body={"kv_transfer_params": {"kind": "shared_memory"}},
        )
    assert chat(client, "What is the capital of France?", "stale").choices[0].message.content
