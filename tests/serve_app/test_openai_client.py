# SPDX-License-Identifier: Apache-2.0
"""The official `openai` client against the service."""

from __future__ import annotations

import openai
import pytest

from tests.serve_app.conftest import MODEL, Service

QUESTION = [{"role": "user", "content": "Who wrote the song?"}]


@pytest.fixture()
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=3, temperature=0, user="me", metadata={"a": "b"}, n=1
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "word word word")
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 3 and usage.total_tokens == usage.prompt_tokens + 3
    # Five chunks of 16 tokens and the header were loaded, the question was computed.
    cached = usage.prompt_tokens_details.cached_tokens
    assert 5 * 16 < cached < usage.prompt_tokens
    rag = answer.model_extra["rag"]
    assert [citation["chunk_id"] for citation in rag["citations"]] == [f"chunk-{i}" for i in range(5)]
    assert rag["citations"][1]["document_id"] == "doc-1" and rag["citations"][1]["score"] == 0.9
    assert (rag["method"], rag["corpus"], rag["generation"]) == ("stale", "default", "000001")
    assert {"retrieve", "mend", "engine", "ttft"} <= answer.model_extra["stages_ms"].keys()


def test_chat_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    *pieces, tail = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == "word word word word"
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None, None, None, "stop"]
    assert len(pieces[-1].model_extra["rag"]["citations"]) == 5 and pieces[-1].model_extra["stages_ms"]["ttft"] > 0
    assert tail.choices == [] and tail.usage.completion_tokens == 4
    assert tail.usage.prompt_tokens_details.cached_tokens > 0
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_conversation_in_parts_with_a_system_prompt_of_its_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "wrote?"}]},
            {"role": "assistant", "content": "A person."},
            {"role": "user", "content": "Which?"},
        ],
    )
    assert answer.choices[0].message.content


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [-0.5, -0.5]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)
    assert plain.choices[0].logprobs is None


def test_rag_options(client: openai.OpenAI) -> None:
    def cited(**rag: object) -> list[str]:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"rag": rag})
        return [citation["chunk_id"] for citation in answer.model_extra["rag"]["citations"]]

    assert cited(top_k=2) == ["chunk-0", "chunk-1"]
    assert cited(chunk_ids=["chunk-3", "chunk-1"]) == ["chunk-3", "chunk-1"]


def test_full_reuses_nothing(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"rag": {"method": "full"}})
    assert answer.usage.prompt_tokens_details.cached_tokens == 0 and answer.model_extra["rag"]["method"] == "full"


def test_plain_completion_retrieves_nothing(client: openai.OpenAI, service: Service) -> None:
    before = service.counts("Retriever")["started"]
    answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=3, logprobs=1)
    assert answer.choices[0].text == "word word word" and answer.choices[0].logprobs.text_offset == [0, 5, 10]
    assert "rag" not in answer.model_extra and service.counts("Retriever")["started"] == before
    ids = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=3)
    assert ids.usage.prompt_tokens == 3


def test_completion_with_chunks_before_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[5, 6, 7], max_tokens=1, extra_body={"rag": {"chunk_ids": ["chunk-2", "chunk-0"]}}
    )
    # No template: two chunks of 16 tokens, then the prompt. This tokenizer puts nothing before a text.
    assert answer.usage.prompt_tokens == 2 * 16 + 3 and answer.usage.prompt_tokens_details.cached_tokens == 32
    assert [citation["chunk_id"] for citation in answer.model_extra["rag"]["citations"]] == ["chunk-2", "chunk-0"]


def test_completion_streams(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="Once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "word word word word"


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"rag": {"top_k": 0}})
    assert error.value.param == "rag.top_k"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"rag": {"corpus": "nowhere"}})


def test_a_failure_inside_a_stream_reaches_the_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "[[fail_late=1]] [[words=3]] Who?"}], stream=True
    )
    with pytest.raises(openai.APIError, match="failed"):
        list(stream)
