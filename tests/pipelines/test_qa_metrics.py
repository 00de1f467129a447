# SPDX-License-Identifier: Apache-2.0
"""Answer metrics against values worked out by hand, a case per rule of CacheRepair's definitions."""

from __future__ import annotations

import pytest

from pipelines.qa.metrics import exact_match, extract_answer, f1, normalize_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\n\n Stanley \nbecause", "Stanley"),  # the first line after leading newlines
        (" Stanley", "Stanley"),
        ("Yes, it does.", "Yes"),  # a verdict and punctuation
        ("no", "no"),  # a verdict and the end
        ("no \nmore", "no"),
        ("Yes it does", "Yes it does"),  # neither
        ("Nordic, they say", "Nordic, they say"),
        ("The answer: yes.", "The answer: yes."),  # not leading
        ("  \nStanley", ""),  # the first line is blank, and is not a newline
        ("", ""),
    ],
)
def test_the_answer_in_what_was_written(text: str, answer: str) -> None:
    assert extract_answer(text) == answer
    assert extract_answer(answer) == answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  The   Cat ", "cat"),
        ("A man, an ape, the theatre", "man ape theatre"),
        ("U.S.A.", "usa"),  # punctuation goes before articles are looked for
        ("a.n. other", "other"),
        ("rock-'n'-roll", "rocknroll"),
        ("«Amélie»", "«amélie»"),  # ASCII punctuation only
        ("The", ""),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "golds", "want_f1", "want_em"),
    [
        ("the Big Cat!", ["big cat"], 1.0, 1.0),
        ("big cat", ["big dog"], 0.5, 0.0),
        ("cat cat cat", ["cat"], 0.5, 0.0),  # shared words count as often as both have them: 2*1/(3+1)
        ("cat cat", ["cat cat dog"], 0.8, 0.0),
        ("one two three", ["two", "one two"], 0.8, 0.0),  # the best gold answer
        ("two", ["nothing here", "two"], 1.0, 1.0),
        ("the", ["a"], 1.0, 1.0),  # nothing is left of both
        ("", ["cat"], 0.0, 0.0),
        ("cat", ["the"], 0.0, 0.0),
        ("Yes, because of the film", ["yes"], 1.0, 1.0),
        ("Stanley\nNorth Dakota", ["Stanley"], 1.0, 1.0),
    ],
)
def test_f1_and_exact_match(prediction: str, golds: list[str], want_f1: float, want_em: float) -> None:
    assert f1(prediction, golds) == pytest.approx(want_f1)
    assert exact_match(prediction, golds) == want_em
    extracted = extract_answer(prediction)
    assert (f1(extracted, golds), exact_match(extracted, golds)) == (f1(prediction, golds), want_em)
