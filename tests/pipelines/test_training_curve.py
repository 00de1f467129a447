# SPDX-License-Identifier: Apache-2.0
"""The loss curve, read while it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.training.curve import Curve, CurveReader, read_curve
from pipelines.training.state import StateError


def test_each_line_is_read_once_and_a_half_written_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    reader, curve = CurveReader(path), Curve(path)
    assert reader.new() == []
    curve.begin(0)
    curve.add({"update": 1})
    curve.add({"update": 2})
    assert reader.new() == [{"update": 1}, {"update": 2}]
    with path.open("a") as file:
        file.write('{"update"')
        file.flush()
        assert reader.new() == []
        assert read_curve(path) == [{"update": 1}, {"update": 2}]
        file.write(": 3}\n")
    assert reader.new() == [{"update": 3}]
    assert reader.new() == []


def test_a_run_that_goes_on_tells_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    curve = Curve(path)
    curve.begin(0)
    for update in range(1, 6):
        curve.add({"update": update})
    reader = CurveReader(path)
    assert len(reader.new()) == 5
    curve.begin(3)  # the last state: updates 4 and 5 are lost
    curve.add({"update": 4})
    assert reader.new() == [{"update": 1}, {"update": 2}, {"update": 3}, {"update": 4}]


def test_a_curve_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    path.mkdir()
    with pytest.raises(StateError, match=r"cannot write the loss curve .*curve\.jsonl"):
        Curve(path).add({"update": 1})
