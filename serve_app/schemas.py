# SPDX-License-Identifier: Apache-2.0
"""What a client may send: OpenAI's request shapes, closed to unknown fields, with a `rag` object of our own.

Three kinds of fields. *Used* ones change the answer. *Noted* ones (user, metadata ...) are part of OpenAI's API, mean
nothing here and are accepted, so that the official client works unchanged. *Fixed* ones (n, tools ...) are accepted at
the value that means "off"; any other value is refused, because ignoring it would give an answer that was not asked for.
Bounds that depend on the settings are checked in `serve_app.bounds`. Lists and dictionaries have a bound here too and
stop at their first bad element: otherwise a body of a megabyte makes half a million errors to read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from retrieval.types import MAX_CHUNK_ID

MAX_STOPS = 4
MAX_METHOD_PARAMS = 16
MAX_PARAM_NUMBERS = 256
"""Beyond the layers of any target."""
MAX_MESSAGES = 256
MAX_CHUNK_IDS = 1024
"""Beyond any sensible `retrieval.max_top_k`, which is the tighter bound of a service."""
MAX_PROMPT_IDS = 2**20
"""Beyond any context; `engine.max_model_len` is the tighter bound of a service."""


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character: remove it")
    return text


def _only(*allowed: Any, why: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise ValueError(f"{why}: leave it out, or send {allowed[0]!r}")
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_no_nul)]
Name = Annotated[Text, Field(min_length=1, max_length=256)]
ChunkId = Annotated[Text, Field(min_length=1, max_length=MAX_CHUNK_ID)]
CorpusName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
ParamNumbers = Annotated[list[int], Field(max_length=MAX_PARAM_NUMBERS, fail_fast=True)]
StopText = Annotated[Text, Field(min_length=1, max_length=256)]
OneAnswer = Annotated[int | None, _only(1, None, why="one answer per request is supported")]
NoTools = Annotated[list[Any] | None, _only([], None, why="tools are not supported")]
NoChoice = Annotated[Any, _only("none", "auto", None, why="tools are not supported")]
NoLogitBias = Annotated[dict[str, float] | None, _only({}, None, why="logit_bias is not supported")]
NotStored = Annotated[bool | None, _only(False, None, why="answers are not stored")]


class Request(BaseModel):
    """A closed request model. Types are strict: `"5"` is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RagOptions(Request):
    """Which chunks the answer may use, and how their caches are reused."""

    corpus: CorpusName | None = Field(None, description="Corpus to search; the service's default when left out.")
    top_k: int | None = Field(None, ge=1, description="Chunks to retrieve.")
    method: Name | None = Field(None, description="Repair method; the service's default when left out.")
    method_params: Annotated[
        dict[Name, bool | int | float | str | ParamNumbers | None], Field(max_length=MAX_METHOD_PARAMS, fail_fast=True)
    ] = Field(default_factory=dict, description="Parameters of the repair method.")
    chunk_ids: Annotated[list[ChunkId], Field(min_length=1, max_length=MAX_CHUNK_IDS, fail_fast=True)] | None = Field(
        None, description="Use exactly these chunks, in this order, instead of searching."
    )

    @model_validator(mode="after")
    def _one_selection(self) -> RagOptions:
        if self.chunk_ids is not None and self.top_k is not None:
            raise ValueError("give either `top_k` or `chunk_ids`, not both")
        if self.chunk_ids is not None and len(set(self.chunk_ids)) != len(self.chunk_ids):
            raise ValueError("`chunk_ids` names a chunk twice: remove one")
        return self


class TextPart(Request):
    """A part of a message. Images, audio and files are not supported."""

    type: Annotated[Literal["text"], _only("text", why="only text parts are supported")]
    text: Text


class Message(Request):
    """A message of the conversation; content is a string or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    name: Name | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Request):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, _only(False, None, why="obfuscation is not supported")] = None


class ResponseFormat(Request):
    """Only plain text is supported."""

    type: Annotated[Literal["text"], _only("text", why="only plain text answers are supported")]


class Sampling(Request):
    """Fields that chat and plain completions share."""

    model: Name | None = Field(None, description="The served model; the only one when left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, description="Longest answer, in tokens.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    rag: RagOptions | None = None

    user: Text | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    n: OneAnswer = None
    logit_bias: NoLogitBias = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` is only allowed with `stream`: true")
        return self

    def sampling(self, max_tokens: int) -> dict[str, Any]:
        """Fields for the engine, as `SamplingParams` names them; what the client left out is left out."""
        names = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.top_count is not None:
            values["logprobs"] = self.top_count
        return {"max_tokens": max_tokens, **values}

    @property
    def answer_tokens(self) -> int | None:
        """The answer length asked for."""
        return self.max_tokens

    @property
    def top_count(self) -> int | None:
        """Alternatives per token asked for; None means no log-probabilities."""
        return None


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`. Retrieval is on; `rag` changes how."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, description="Longest answer, in tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    reasoning_effort: str | None = None
    verbosity: str | None = None
    parallel_tool_calls: bool | None = None

    response_format: ResponseFormat | None = None
    modalities: Annotated[list[str] | None, _only(["text"], None, why="only text is supported")] = None
    store: NotStored = None
    tools: NoTools = None
    tool_choice: NoChoice = None
    functions: NoTools = None
    function_call: NoChoice = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.messages[-1].role != "user":
            raise ValueError("the last of `messages` must have the role `user`: it is the question")
        if any(message.role in ("system", "developer") for message in self.messages[1:]):
            raise ValueError("a system message is only allowed as the first of `messages`")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` differ: send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")
        return self

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def system(self) -> str | None:
        """The system prompt the client sent, if any."""
        first = self.messages[0]
        return first.text if first.role in ("system", "developer") else None

    @property
    def turns(self) -> list[dict[str, str]]:
        """The conversation without the system prompt; the last turn is the question."""
        start = 0 if self.system is None else 1
        return [{"role": message.role, "content": message.text} for message in self.messages[start:]]

    @property
    def question(self) -> str:
        """What is searched for."""
        return self.messages[-1].text


class CompletionRequest(Sampling):
    """`POST /v1/completions`. A plain completion; with `rag`, chunks are put before the prompt."""

    prompt: (
        Text
        | Annotated[
            list[Annotated[int, Field(ge=0)] | Text], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)
        ]
    )
    logprobs: int | None = Field(None, ge=0, le=5)

    best_of: OneAnswer = None
    echo: Annotated[bool | None, _only(False, None, why="echo is not supported")] = None
    suffix: Annotated[str | None, _only("", None, why="suffix is not supported")] = None

    @model_validator(mode="after")
    def _one_prompt(self) -> CompletionRequest:
        if isinstance(self.prompt, list):
            if any(isinstance(item, str) for item in self.prompt) and len(self.prompt) > 1:
                raise ValueError("one prompt per request is supported: send `prompt` as a string or as token ids")
            if self.rag is not None and self.token_ids is not None and self.rag.chunk_ids is None:
                raise ValueError("a search needs words: send `prompt` as a string, or name `rag.chunk_ids`")
        return self

    @property
    def token_ids(self) -> list[int] | None:
        """The prompt, when it came as token ids."""
        return self.prompt if isinstance(self.prompt, list) and isinstance(self.prompt[0], int) else None

    @property
    def question(self) -> str:
        """The prompt as text; empty when it came as token ids."""
        if isinstance(self.prompt, str):
            return self.prompt
        return self.prompt[0] if isinstance(self.prompt[0], str) else ""

    @property
    def top_count(self) -> int | None:
        return self.logprobs
