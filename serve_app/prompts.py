# SPDX-License-Identifier: Apache-2.0
"""Token ids of what a client sent: what stands before the chunks, and what follows them."""

from __future__ import annotations

import asyncio
import copy
import threading

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.prompt import PromptTemplate
from kvcache.settings import PromptSettings
from serve_app.bounds import check_token_ids
from serve_app.schemas import ChatRequest, CompletionRequest

_INLINE_CHARS = 2_000
"""Texts up to this long are tokenised on the event loop: it takes less time than switching threads twice."""

HeaderAndQuestion = tuple[tuple[int, ...], tuple[int, ...]]


class Prompts:
    """Makes header and question ids.

    Args:
        tokenizer: the target's, with a chat template.
        settings: the texts around the question.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: PromptSettings) -> None:
        self._template = PromptTemplate(tokenizer, settings)
        self._header = self._template.header_ids()
        # Plain completions use a tokenizer of their own: the template switches the handling of special tokens.
        self._plain = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._bos = self._opening()

    async def encode(self, request: ChatRequest | CompletionRequest) -> HeaderAndQuestion:
        """Header and question ids; long texts are tokenised in a thread.

        Raises:
            ApiError, PromptError: the request does not make a prompt.
        """
        if isinstance(request, ChatRequest):
            chars, encode = sum(len(message.text) for message in request.messages), self._chat
        else:
            chars, encode = len(request.question), self._completion
        return encode(request) if chars <= _INLINE_CHARS else await asyncio.to_thread(encode, request)

    def _chat(self, request: ChatRequest) -> HeaderAndQuestion:
        header = self._header if request.system is None else self._template.header_ids(request.system)
        return header, self._template.question_ids(request.turns)

    def _completion(self, request: CompletionRequest) -> HeaderAndQuestion:
        """No template: the prompt as it is, behind the tokenizer's opening token if it has one."""
        if request.token_ids is not None:
            prompt = check_token_ids(request.token_ids, len(self._plain))
            return self._bos if request.rag is not None else (), prompt
        with self._lock:
            ids = tuple(self._plain(request.question, add_special_tokens=False)["input_ids"])
        return (self._bos, ids) if request.rag is not None else ((), (*self._bos, *ids))

    def _opening(self) -> tuple[int, ...]:
        ids = self._plain("")["input_ids"]
        return (ids[0],) if ids and ids[0] == self._plain.bos_token_id else ()
