# SPDX-License-Identifier: Apache-2.0
"""Answer metrics, by CacheRepair's definitions (methods, section 0.8): other papers' F1 is another number."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_YES_NO = re.compile(rf"(yes|no)(?=[{re.escape(string.punctuation)}]|\Z)", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def extract_answer(text: str) -> str:
    """The answer in what a model wrote: its first line after leading newlines.

    A leading yes or no that punctuation or the end follows stands for the whole line. Applied twice, it changes
    nothing more.
    """
    line = text.lstrip("\r\n").split("\n", 1)[0].strip()
    verdict = _YES_NO.match(line)
    return verdict[1] if verdict else line


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, without a/an/the, single spaces; in this order."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def f1(prediction: str, golds: Sequence[str]) -> float:
    """Best F1 over the gold answers, of whitespace words after normalisation, 0 to 1.

    Args:
        prediction: what the model wrote, extracted or not.
        golds: accepted answers, at least one.
    """
    words = normalize_answer(extract_answer(prediction)).split()
    return max(_word_f1(words, normalize_answer(gold).split()) for gold in golds)


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1 when some gold answer equals the prediction after normalisation, else 0; arguments as for `f1`."""
    answer = normalize_answer(extract_answer(prediction))
    return float(max(answer == normalize_answer(gold) for gold in golds))


def _word_f1(words: Sequence[str], gold: Sequence[str]) -> float:
    if not words or not gold:
        return float(not words and not gold)
    shared = (Counter(words) & Counter(gold)).total()
    return 2 * shared / (len(words) + len(gold))
