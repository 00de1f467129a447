# SPDX-License-Identifier: Apache-2.0
"""The prompt around the chunks: header chunk, then chunks, then the question.

The chat template is rendered once with a mark where the chunks go, and once more with a mark for each message. What
the template itself says is tokenised with its special tokens; what a person wrote is tokenised as plain text, so that
a question (or a document) that spells `<|im_end|>` stays text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcache.settings import PromptSettings

_CHUNKS = "\x02chunks\x02"
_MARK = re.compile("\x02text([0-9]+)\x02")


class PromptError(ValueError):
    """The messages do not make a prompt; the text says what to change."""


class PromptTemplate:
    """Builds token ids around the chunks. Thread-safe.

    Args:
        tokenizer: the target's, with a chat template.
        settings: the texts around the question.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: PromptSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._lock = threading.Lock()

    def header_ids(self, system: str | None = None) -> tuple[int, ...]:
        """Ids of the header chunk: the template's opening, the system prompt, the opening of the user's turn.

        Args:
            system: None takes the setting.
        """
        text, texts = self._render([{"role": "user", "content": ""}], system)
        return self._encode(text.split(_CHUNKS)[0], texts)

    def question_ids(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Ids that follow the chunks: conversation so far, instruction, question, and the opening of the answer.

        Args:
            messages: `{"role": "user" | "assistant", "content": str}`, beginning and ending with the user;
                the last is the question.

        Raises:
            PromptError: no question, or roles out of order.
        """
        roles = [message["role"] for message in messages]
        if not messages or roles[-1] != "user":
            raise PromptError("messages must end with a user message: the question")
        if roles != [("user", "assistant")[i % 2] for i in range(len(roles))]:
            raise PromptError("user and assistant messages must alternate, beginning with user")
        if not messages[-1]["content"].strip():
            raise PromptError("the question is empty")
        question = f"{self._settings.instruction}\nQuestion: {messages[-1]['content'].strip()}"
        text, texts = self._render([*messages[:-1], {"role": "user", "content": question}], None)
        return self._encode(text.split(_CHUNKS)[1] + self._settings.answer_cue, texts)

    def _render(self, messages: Sequence[dict[str, str]], system: str | None) -> tuple[str, list[str]]:
        texts = [self._settings.system if system is None else system]
        marked: list[dict[str, Any]] = [{"role": "system", "content": "\x02text0\x02"}]
        for message in messages:
            marked.append({"role": message["role"], "content": f"\x02text{len(texts)}\x02"})
            texts.append(message["content"])
        texts[1] = f"\n\n{texts[1]}"
        marked[1]["content"] = _CHUNKS + marked[1]["content"]
        return self._tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True), texts

    def _encode(self, text: str, texts: list[str]) -> tuple[int, ...]:
        ids: list[int] = []
        # Odd parts of the split are the numbers of people's texts.
        for index, part in enumerate(_MARK.split(text)):
            ids += self._template_ids(part) if index % 2 == 0 else self._plain_ids(texts[int(part)])
        return tuple(ids)

    def _template_ids(self, text: str) -> list[int]:
        with self._lock:
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _plain_ids(self, text: str) -> list[int]:
        with self._lock:
            return plain_ids(self._tokenizer, text)


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text that is only text: no special token is added, and none is recognised in it."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
